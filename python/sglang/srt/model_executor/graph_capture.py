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
    """Results at a fixed address that all graphs of a runner share; otherwise each would keep its own, 300 MB for
    logits of 512 rows. Results of another width have another address: complete rows of logits, or this rank's
    columns."""

    def __init__(self) -> None:
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def keep(self, result: torch.Tensor) -> torch.Tensor:
        """Copies result [N, ...] to its fixed address and returns it there, valid after each replay until the next. The
        first result of a width must not be captured, and none after it may have more rows, because earlier graphs use
        the address."""
        width = result.shape[1:]
        if width not in self._buffers:
            self._buffers[width] = torch.empty_like(result)
        buffer = self._buffers[width]
        assert len(result) <= len(buffer), "the graph of the most rows is captured first"
        return buffer[: len(result)].copy_(result)


def capture(
    step: Callable[[], object], pool: Any = None, producer: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    """Returns the graph of `step`, which runs twice before, so that kernels are compiled and libraries choose theirs
    outside of the capture. Garbage collection is off, since destroying an older graph would spoil the capture. pool: of
    the graph whose memory this one may share. producer: writes the inputs of `step` before these runs, since the memory
    of a captured graph holds nothing until it is replayed, and random indices would be read."""
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
    """The model between fixed addresses, for all graphs of a runner: a pipeline stage receives and sends outside of its
    graphs. All stages have graphs of the same shapes and exchange the rows of the graph, padding included."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        self.model = model
        self.received = model.input_buffer(max_tokens)
        if self.received is not None:
            self.received.zero_()  # what is no number would stay in the padding's cache slot
        self.sends = not model.description.last_stage

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes hidden states [T, H] under capture."""
        received = None if self.received is None else self.received[: len(batch.input_ids)]
        return self.model.compute(batch, received)

    def replay(self, graph: torch.cuda.CUDAGraph, num_tokens: int, hidden: torch.Tensor | None) -> None:
        """Receives the graph's input rows, replays it, and sends its output rows. hidden [T, H]: output of `compute` in
        the graph of a stage that sends."""
        if self.received is not None:
            self.model.pp.receive_from_previous(self.received[:num_tokens])
        graph.replay()
        if self.sends:
            assert hidden is not None
            self.model.pp.send_to_next(hidden.clone())  # the next replay writes there while these are on their way
