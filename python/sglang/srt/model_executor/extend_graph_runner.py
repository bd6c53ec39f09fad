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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.graph_capture import StaticOutput, capture
from sglang.srt.model_executor.static_pack import StaticPack
from sglang.srt.model_executor.step import ExtendLayout, StepInput

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_PROMPTS = 16


class ExtendGraphRunner:
    """Owns the captured graphs. `sizes` (numbers of tokens) and `decode_sizes` (of decoding requests) ascend."""

    def __init__(self, runner: ModelRunner, sizes: tuple[int, ...], decode_sizes: tuple[int, ...]) -> None:
        self.runner = runner
        self.sizes = sizes
        self.decode_sizes = tuple(size for size in decode_sizes if size <= sizes[-1])
        largest = self.decode_sizes[-1]
        tokens, prompts, sampled = (sizes[-1], np.int64, 0), MAX_PROMPTS + 1, largest + MAX_PROMPTS
        self.inputs = StaticPack(
            {
                "input_ids": tokens,
                "positions": tokens,
                "out_cache_loc": tokens,
                "slots": (prompts, np.int64, 0),
                "last_rows": (sampled, np.int64, 0),
                "sampled_slots": (sampled, np.int64, 0),
                "seq_lens": (prompts, np.int32, 0),
                "extend_lens": (prompts, np.int32, 0),
                "prefix_lens": (prompts, np.int32, 0),
                "start_loc": (prompts + 1, np.int32, 0),
                "sampled_lens": (sampled, np.int32, 0),
                "num_tokens": (1, np.int32, 0),
                "decode_slots": (largest, np.int64, 0),
                "decode_loc": (largest, np.int64, 0),
                "decode_lens": (largest, np.int32, 1),
                "num_decodes": (1, np.int64, 0),
            },
            runner.device,
        )
        self._rows = torch.arange(largest, device=runner.device)
        self.hidden, self.logits = StaticOutput(), StaticOutput()
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
        i, backend = self.inputs, self.runner.attn_backend
        ids, decodes = i["input_ids"][:size], None
        if num_decodes:
            decodes = self.runner.decode_batch(
                i["decode_slots"][:num_decodes], i["decode_lens"][:num_decodes], i["decode_loc"][:num_decodes]
            )
            backend.init_forward_metadata_capture(decodes)
            is_decode = self._rows[:num_decodes] < i["num_decodes"]
            first = torch.where(is_decode, decodes.input_ids, ids[:num_decodes])
            ids = torch.cat((first, ids[num_decodes:]))
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=MAX_PROMPTS + 1,
            input_ids=ids,
            positions=i["positions"][:size],
            req_pool_indices=i["slots"],
            seq_lens=i["seq_lens"],
            token_slots=self.runner.token_slots(i["out_cache_loc"][:size]),
            attn_backend=backend,
            decodes=decodes,
            extend_seq_lens=i["extend_lens"],
            extend_prefix_lens=i["prefix_lens"],
            extend_start_loc=i["start_loc"],
            extend_seq_lens_cpu=[size],
            extend_prefix_lens_cpu=[1],  # a replay may have cached prefixes
            num_valid_tokens=i["num_tokens"],
        )
        backend.init_forward_metadata(batch)
        hidden = self.runner.model(batch)
        self.hidden.keep(hidden)
        self.logits.keep(self.runner.model.logits(hidden[i["last_rows"][: num_decodes + MAX_PROMPTS]]))

    def _capture(self, size: int, num_decodes: int, pool: Any) -> None:
        ends = np.full(MAX_PROMPTS + 2, size, np.int32)
        ends[0] = 0
        self.inputs.load(start_loc=ends, extend_lens=np.array([size], np.int32), seq_lens=np.array([size], np.int32))
        self.graphs[size, num_decodes] = capture(partial(self._step, size, num_decodes), pool)

    def replay(self, step: StepInput, layout: ExtendLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, H] and logits [R, V] of the step; valid until the next replay."""
        extend = step.extend
        assert extend is not None
        count, num_tokens, num_prompts = extend.num_decodes, len(layout.positions), len(extend.extend_lens)
        num_decodes = _at_least(self.decode_sizes, count)
        size = _at_least(self.sizes, max(num_tokens, num_decodes))
        start_loc = np.full(MAX_PROMPTS + 2, num_tokens, np.int32)
        start_loc[: num_prompts + 1] = layout.start_loc
        start_loc[-1] = size
        extend_lens = np.zeros(MAX_PROMPTS + 1, np.int32)
        extend_lens[:num_prompts] = extend.extend_lens
        extend_lens[-1] = size - num_tokens
        self.inputs.load(
            input_ids=np.concatenate((np.zeros(count, np.int64), extend.input_ids)),
            positions=layout.positions,
            out_cache_loc=step.out_cache_loc,
            slots=step.slots[count:],
            last_rows=layout.last_rows,
            sampled_slots=step.sampled_slots,
            seq_lens=step.seq_lens[count:],
            extend_lens=extend_lens,
            prefix_lens=extend.prefix_lens,
            start_loc=start_loc,
            sampled_lens=step.seq_lens[extend.sample_rows],
            num_tokens=np.array([num_tokens], np.int32),
            decode_slots=step.slots[:count],
            decode_loc=step.out_cache_loc[:count],
            decode_lens=step.seq_lens[:count],
            num_decodes=np.array([count], np.int64),
        )
        self.graphs[size, num_decodes].replay()
        return self.hidden.rows(num_tokens), self.logits.rows(len(layout.last_rows))


def _at_least(ascending: tuple[int, ...], number: int) -> int:
    return ascending[bisect.bisect_left(ascending, number)]
