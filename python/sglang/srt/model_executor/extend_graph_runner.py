"""Small prefill steps as CUDA graphs, with and without requests that decode in the same step.

A short prompt computes faster than the host can launch a model's kernels one by one; in a graph it is one launch. There
is a graph for each planned number of tokens and of decoding requests. A step of T tokens runs in the next larger one of
both. The tokens that are missing at the end belong to one more prompt, which owns request slot 0 and cache slot 0 like
all padding. The decoding requests that are missing have their rows over the first prompt tokens, which are computed
after them; so every row holds finite numbers, and the tokens that count lie together at the front.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.graph_capture import StaticOutput, capture
from sglang.srt.model_executor.stage_in_graph import StageInGraph
from sglang.srt.model_executor.step import StepInput, extend_arrays
from sglang.srt.utils.device_arrays import DeviceArrays, Field

MAX_PROMPTS = 16


class ExtendGraphRunner:
    """Owns the captured graphs. `sizes` (numbers of tokens) and `decode_sizes` (of decoding requests) ascend."""

    def __init__(self, state: DeviceState, sizes: tuple[int, ...], decode_sizes: tuple[int, ...]) -> None:
        self.state = state
        self.sizes = sizes
        self.decode_sizes = tuple(size for size in decode_sizes if size <= sizes[-1])
        largest = self.decode_sizes[-1]
        prompts, sampled = (MAX_PROMPTS + 1,), (largest + MAX_PROMPTS,)
        self.inputs = DeviceArrays(
            {
                "input_ids": Field((sizes[-1],), np.int64),
                "positions": Field((sizes[-1],), np.int64),
                "out_cache_loc": Field((sizes[-1],), np.int64),
                "slots": Field(prompts, np.int64),
                "seq_lens": Field(prompts, np.int32),
                "prefix_lens": Field(prompts, np.int32),
                "start_loc": Field((MAX_PROMPTS + 2,), np.int32),
                "decode_slots": Field((largest,), np.int64),
                "decode_lens": Field((largest,), np.int32, 1),
                "decode_loc": Field((largest,), np.int64),
                "last_rows": Field(sampled, np.int64),
                "sampled_slots": Field(sampled, np.int64),
                "sampled_lens": Field(sampled, np.int32),
                "num_tokens": Field((1,), np.int32),
                "num_decodes": Field((1,), np.int64),
            },
            state.device,
        )
        self._rows = torch.arange(largest, device=state.device)
        self.stage, self.output = StageInGraph(state.model, sizes[-1], keeps_hidden=True), StaticOutput()
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        pool: Any = None
        for size in reversed(sizes):
            for decodes in reversed([d for d in self.decode_sizes if d <= size]):
                self._capture(size, decodes, pool)
                pool = pool or self.graphs[size, decodes].pool()

    def fits(self, step: StepInput) -> bool:
        extend = step.extend
        assert extend is not None
        few = len(extend.extend_lens) <= MAX_PROMPTS and extend.num_decodes <= self.decode_sizes[-1]
        return few and len(step.out_cache_loc) <= self.sizes[-1]

    def _step(self, size: int, num_decodes: int) -> None:
        i, state = self.inputs, self.state
        decodes = is_decode = None
        if num_decodes:
            decodes = state.decode_batch(
                i["decode_slots"][:num_decodes], i["decode_lens"][:num_decodes], i["decode_loc"][:num_decodes]
            )
            state.attn_backend.init_forward_metadata_capture(decodes)
            is_decode = self._rows[:num_decodes] < i["num_decodes"]
        batch = state.extend_batch(i, size, decodes, [size], [1], is_decode)  # a replay may have cached prefixes
        batch.num_valid_tokens = i["num_tokens"]
        state.attn_backend.init_forward_metadata(batch)
        hidden = self.stage.compute(batch)
        sampled = hidden[i["last_rows"][: num_decodes + MAX_PROMPTS]]
        self.logits[size, num_decodes] = self.output.keep(state.model.step_logits(sampled))

    def _capture(self, size: int, num_decodes: int, pool: Any) -> None:
        ends = np.full(MAX_PROMPTS + 2, size, np.int32)
        ends[0] = 0
        self.inputs.load(start_loc=ends, seq_lens=np.array([size], np.int32))
        self.graphs[size, num_decodes] = capture(partial(self._step, size, num_decodes), pool)

    def replay(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, H], and logits as `CausalLM.step_logits` has them; valid until the next replay."""
        extend = step.extend
        assert extend is not None
        arrays = extend_arrays(step)
        count, num_tokens = extend.num_decodes, len(step.out_cache_loc)
        num_decodes = _at_least(self.decode_sizes, count)
        size = _at_least(self.sizes, max(num_tokens, num_decodes))
        start_loc = np.full(MAX_PROMPTS + 2, num_tokens, np.int32)
        start_loc[: len(extend.extend_lens) + 1] = arrays["start_loc"]
        start_loc[-1] = size
        arrays["start_loc"] = start_loc
        self.inputs.load(**arrays, num_tokens=np.array([num_tokens], np.int32), num_decodes=np.array([count], np.int64))
        self.stage.replay(self.graphs[size, num_decodes], size)
        return self.stage.hidden[size][:num_tokens], self.logits[size, num_decodes][: len(extend.sample_rows)]


def _at_least(ascending: tuple[int, ...], number: int) -> int:
    return ascending[bisect.bisect_left(ascending, number)]
