"""Steps that verify drafts as CUDA graphs, one for each planned batch size, as decode steps are.

Rows, positions and cache slots are computed inside the graph, from the lengths that the device keeps. Batches between
two sizes are padded with requests of width 0, which own request slot 0 and cache slot 0.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.graph_capture import StaticOutput, capture
from sglang.srt.model_executor.step import StepInput
from sglang.srt.utils.device_arrays import DeviceArrays, Field


class VerifyGraphRunner:
    """Owns the captured graphs. `batch_sizes` ascend."""

    def __init__(self, state: DeviceState, batch_sizes: tuple[int, ...]) -> None:
        self.state = state
        self.batch_sizes = batch_sizes
        largest = (batch_sizes[-1],)
        fields = {
            "slots": Field(largest, np.int64),
            "widths": Field(largest, np.int32),
            "num_tokens": Field((1,), np.int32),
        }
        self.inputs = DeviceArrays(fields, state.device)
        self.inputs.load()
        self.output = StaticOutput()
        self.results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool: Any = None
        for size in reversed(batch_sizes):
            self.graphs[size] = capture(partial(self._step, size), pool)
            pool = pool or self.graphs[size].pool()

    def fits(self, num_reqs: int) -> bool:
        return num_reqs <= self.batch_sizes[-1]

    def _step(self, size: int) -> None:
        i, state = self.inputs, self.state
        batch = state.verify_batch(i["slots"][:size], i["widths"][:size], i["num_tokens"])
        state.attn_backend.init_forward_metadata(batch)
        positions = self.output.keep(batch.positions)
        self.results[size] = self.output.keep(state.model.step_logits(state.model(batch))), positions

    def replay(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B k, V] and positions [B k]; valid until the next replay."""
        assert step.widths is not None
        num_reqs = len(step.slots)
        num_tokens = num_reqs * self.state.tokens_per_step
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, num_reqs)]
        self.inputs.load(slots=step.slots, widths=step.widths, num_tokens=np.array([num_tokens], np.int32))
        self.graphs[size].replay()
        logits, positions = self.results[size]
        return logits[:num_tokens], positions[:num_tokens]
