"""Decode steps as CUDA graphs, one for each planned batch size.

A graph holds everything from the request slots to the logits: reading the last sampled tokens, the positions, the table
update, attention metadata that lives on the device, and the model. A replay therefore needs one small copy and one
launch, and what the attention backend refreshes on the host (`layers/forward_batch.py`). Batches between
two sizes are padded with rows that own request slot 0 and cache slot 0.
"""

from __future__ import annotations

import bisect
from functools import partial

import numpy as np
import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.graph_capture import StaticOutput, capture
from sglang.srt.model_executor.stage_in_graph import StageInGraph
from sglang.srt.model_executor.step import StepInput
from sglang.srt.utils.device_arrays import DeviceArrays, Field

SMALL_BYTES = 2 << 20
"""Of logits that a graph keeps for itself: those of a row or two, whose copy would be one launch more."""


class CudaGraphRunner:
    """Owns the captured graphs. `batch_sizes` ascend."""

    def __init__(self, state: DeviceState, batch_sizes: tuple[int, ...]) -> None:
        self.state = state
        self.batch_sizes = batch_sizes
        largest = batch_sizes[-1]
        self.num_windows = state.num_tables - 1
        fields = {
            "slots": Field((largest,), np.int64),
            "out_cache_loc": Field((largest,), np.int64),
            "seq_lens": Field((largest,), np.int32, 1),
            "num_reqs": Field((1,), np.int32),
        }
        if self.num_windows:
            # What a step leaves of them writes once more that the padding row has the padding slot.
            most = (self.num_windows * largest,)
            fields |= {"table_index": Field(most, np.int64), "table_value": Field(most, np.int32)}
        self.inputs = DeviceArrays(fields, state.device)
        self.inputs.load()
        self.batches: dict[int, ForwardBatch] = {}
        self.stage, self.output = StageInGraph(state.model, largest), StaticOutput()
        self.logits: dict[int, torch.Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        state.attn_backend.init_cuda_graph_state(batch_sizes)
        pool = None
        for size in reversed(batch_sizes):  # the largest first: smaller graphs then reuse its memory
            padding = self._static_batch(size)
            padding.seq_lens_cpu = [1] * size
            state.attn_backend.init_forward_metadata_replay(padding, 0)
            self.graphs[size] = capture(partial(self._step, size), pool)
            pool = pool or self.graphs[size].pool()

    def fits(self, num_reqs: int) -> bool:
        return num_reqs <= self.batch_sizes[-1]

    def updates_tables(self, step: StepInput) -> bool:
        """Whether the graph of a decode step writes its `table_update`: new slots of windows, and nothing else."""
        update = step.table_update
        assert update is not None
        return len(update.index) <= self.num_windows * len(step.slots) and not len(update.state_targets)

    def _static_batch(self, size: int) -> ForwardBatch:
        i = self.inputs
        if self.num_windows:
            index, value = (i[name][: self.num_windows * size] for name in ("table_index", "table_value"))
            self.state.req_to_token.view(-1)[index] = value
        slots, seq_lens, out_cache_loc = (i[name][:size] for name in ("slots", "seq_lens", "out_cache_loc"))
        return self.state.decode_batch(slots, seq_lens, out_cache_loc, i["num_reqs"])

    def _step(self, size: int) -> None:
        batch = self.batches[size] = self._static_batch(size)
        self.state.attn_backend.init_forward_metadata_capture(batch)
        logits = self.state.model.step_logits(self.stage.compute(batch))
        small = logits.nbytes <= SMALL_BYTES and logits.is_contiguous()
        self.logits[size] = logits if small else self.output.keep(logits)

    def replay(self, step: StepInput) -> torch.Tensor:
        """Logits [B, V] of a decode step, or what `CausalLM.step_logits` has of them; valid until the next replay."""
        num_reqs = len(step.slots)
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, num_reqs)]
        arrays = {"slots": step.slots, "out_cache_loc": step.out_cache_loc, "seq_lens": step.seq_lens}
        if self.num_windows and step.table_update is not None and self.updates_tables(step):
            arrays |= {"table_index": step.table_update.index, "table_value": step.table_update.value}
        self.inputs.load(**arrays, num_reqs=np.array([num_reqs], np.int32))
        batch = self.batches[size]
        batch.seq_lens_cpu = step.seq_lens.tolist() + [1] * (size - num_reqs)
        self.state.attn_backend.init_forward_metadata_replay(batch, num_reqs)
        self.stage.replay(self.graphs[size], size)
        return self.logits[size][:num_reqs]
