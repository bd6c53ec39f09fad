"""Capture of a step in a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.layers.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from sglang.srt.models.causal_lm import CausalLM


class StaticOutput:
    """Buffers for results, at fixed addresses that all graphs of a runner share; otherwise each graph would keep its
    own, 300 MB for logits of 512 rows. There is one buffer for each width: logits may have all columns, or only those
    of this rank."""

    def __init__(self) -> None:
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def keep(self, result: torch.Tensor) -> torch.Tensor:
        """Copies `result` [N, ...] into the buffer of its width and returns the first N rows of that buffer, valid from
        a replay until the next one. The first call for a width allocates the buffer, so it must not be captured. Later
        results must not have more rows, because earlier graphs use the buffer's address."""
        width = result.shape[1:]
        if width not in self._buffers:
            self._buffers[width] = torch.empty_like(result)
        buffer = self._buffers[width]
        assert len(result) <= len(buffer), "the graph of the most rows is captured first"
        return buffer[: len(result)].copy_(result)


def capture(
    step: Callable[[], object], pool: Any = None, producer: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    """Captures `step` in a CUDA graph and returns the graph. Before that, `step` runs twice, so that kernels are
    compiled and libraries choose their kernels outside of the capture. Garbage collection is off during the capture,
    which the destruction of an older graph would spoil.

    pool: the memory pool of an earlier graph, which this one shares; None: a pool of its own
    producer: writes the inputs of `step` before each of the two runs. Needed if an earlier graph computes them: its
        memory is not initialized before its first replay, and `step` would take random numbers for indices.
    """
    for _ in range(2):
        if producer is not None:
            producer()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            step()
    finally:
        if collecting:
            gc.enable()
    return graph


class GraphedStage:
    """The model of one pipeline stage, and the buffer at a fixed address from which its graphs read what the previous
    stage sent. Receiving and sending happen outside of the graphs. All stages have graphs of the same shapes and
    exchange all rows of a graph, padding included."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        self.model = model
        self.received = model.input_buffer(max_tokens)
        if self.received is not None:
            self.received.zero_()  # a NaN would stay in the padding's cache slot
        self.sends = not model.description.last_stage

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the hidden states [T, H] of a batch. Called under capture, and in the runs before it."""
        received = None if self.received is None else self.received[: len(batch.input_ids)]
        return self.model.compute(batch, received)

    def replay(self, graph: torch.cuda.CUDAGraph, num_tokens: int, hidden: torch.Tensor | None) -> None:
        """Receives `num_tokens` rows from the previous stage, replays the graph, and sends its output to the next one.
        hidden [T, H]: what `compute` returned when this graph was captured; may be None in the last stage."""
        if self.received is not None:
            self.model.pp.receive_from_previous(self.received[:num_tokens])
        graph.replay()
        if self.sends:
            assert hidden is not None
            self.model.pp.send_to_next(hidden.clone())  # the next replay may overwrite it before it is sent
