"""Small prefill steps as CUDA graphs, one for each planned number of tokens.

A short prompt computes faster than the host can launch a model's kernels one by one; in a graph it is one launch. A
step of T tokens runs in the next larger graph: the tokens that are missing belong to one more request at the end, which
owns request slot 0 and cache slot 0 like all padding, so that every row holds finite numbers.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.graph_capture import capture
from sglang.srt.model_executor.static_pack import StaticPack
from sglang.srt.model_executor.step import StepInput

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_REQS = 16


class ExtendGraphRunner:
    """Owns the captured graphs. `sizes` (numbers of tokens) ascend."""

    def __init__(self, runner: ModelRunner, sizes: tuple[int, ...]) -> None:
        self.runner = runner
        self.sizes = sizes
        tokens, reqs = (sizes[-1], np.int64, 0), MAX_REQS + 1
        self.inputs = StaticPack(
            {
                "input_ids": tokens,
                "positions": tokens,
                "out_cache_loc": tokens,
                "slots": (reqs, np.int64, 0),
                "last_rows": (MAX_REQS, np.int64, 0),
                "sampled_slots": (MAX_REQS, np.int64, 0),
                "seq_lens": (reqs, np.int32, 0),
                "extend_lens": (reqs, np.int32, 0),
                "prefix_lens": (reqs, np.int32, 0),
                "start_loc": (reqs + 1, np.int32, 0),
                "sampled_lens": (MAX_REQS, np.int32, 0),
                "num_tokens": (1, np.int32, 0),
            },
            runner.device,
        )
        self.hidden: dict[int, torch.Tensor] = {}
        self.logits: dict[int, torch.Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool: Any = None
        for size in reversed(sizes):
            self._capture(size, pool)
            pool = pool or self.graphs[size].pool()

    def fits(self, step: StepInput) -> bool:
        extend = step.extend
        assert extend is not None
        few = len(step.slots) <= MAX_REQS and len(extend.input_ids) <= self.sizes[-1]
        return few and int(extend.input_ids.min()) >= 0  # NEXT_TOKEN is for mixed batches, which are rare

    def _step(self, size: int) -> None:
        i = self.inputs
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=MAX_REQS + 1,
            input_ids=i["input_ids"][:size],
            positions=i["positions"][:size],
            req_pool_indices=i["slots"],
            seq_lens=i["seq_lens"],
            out_cache_loc=i["out_cache_loc"][:size],
            req_to_token=self.runner.req_pool.device_table,
            kv_pool=self.runner.kv_pool,
            attn_backend=self.runner.attn_backend,
            extend_seq_lens=i["extend_lens"],
            extend_prefix_lens=i["prefix_lens"],
            extend_start_loc=i["start_loc"],
            extend_seq_lens_cpu=[size],
            extend_prefix_lens_cpu=[1],  # a replay may have cached prefixes
            num_valid_tokens=i["num_tokens"],
        )
        self.runner.attn_backend.init_forward_metadata(batch)
        self.hidden[size] = self.runner.model(batch)
        self.logits[size] = self.runner.model.logits(self.hidden[size][i["last_rows"]])

    def _capture(self, size: int, pool: Any) -> None:
        ends = np.full(MAX_REQS + 2, size, np.int32)
        ends[0] = 0
        self.inputs.load(start_loc=ends, extend_lens=np.array([size], np.int32), seq_lens=np.array([size], np.int32))
        self.graphs[size] = capture(partial(self._step, size), pool)

    def replay(self, step: StepInput, positions: np.ndarray, start: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, H] and logits [R, V] of the step; valid until the next replay. `positions` [T] and `start`
        [B + 1] are derived from the step by the caller."""
        extend = step.extend
        assert extend is not None
        num_tokens, num_reqs, rows = len(positions), len(step.slots), extend.sample_rows
        size = self.sizes[bisect.bisect_left(self.sizes, num_tokens)]
        start_loc = np.full(MAX_REQS + 2, num_tokens, np.int32)
        start_loc[: num_reqs + 1] = start
        start_loc[-1] = size
        extend_lens = np.zeros(MAX_REQS + 1, np.int32)
        extend_lens[:num_reqs] = extend.extend_lens
        extend_lens[-1] = size - num_tokens
        self.inputs.load(
            input_ids=extend.input_ids,
            positions=positions,
            out_cache_loc=step.out_cache_loc,
            slots=step.slots,
            last_rows=start[1:][rows] - 1,
            sampled_slots=step.slots[rows],
            seq_lens=step.seq_lens,
            extend_lens=extend_lens,
            prefix_lens=extend.prefix_lens,
            start_loc=start_loc,
            sampled_lens=step.seq_lens[rows],
            num_tokens=np.array([num_tokens], np.int32),
        )
        self.graphs[size].replay()
        return self.hidden[size][:num_tokens], self.logits[size][: len(rows)]
