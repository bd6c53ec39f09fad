"""Layer-by-layer waits of a step for pages that are still being loaded.

The copying thread records for each layer when its copy is on the stream; the step makes its own stream wait for that
before the layer. So a prompt whose prefix is being loaded begins as soon as the first layer is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

FIRST = -1
"""Stands in place of a layer for what a step needs before its first layer, such as states."""


class LayerwiseLoad:
    """The layers of one load, in the order in which they arrive. Filled by the thread that copies."""

    def __init__(self, layers: Sequence[int], is_cuda: bool) -> None:
        """`layers`: the layers that are loaded, ascending."""
        self.layers = (FIRST, *layers)
        self._launched = [threading.Event() for _ in self.layers]
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in self.layers]

    def arrived(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """Records that all of `layers[index]` has been launched on the stream (on a CPU: copied)."""
        event = self._copied[index]
        if event is not None:
            event.record(stream)
        self._launched[index].set()

    def end_waits(self) -> None:
        """Ends all waits: the copy has ended, well or not. The copy's state says whether what a step has read is
        valid."""
        for launched in self._launched:
            launched.set()

    def wait(self, index: int) -> None:
        """Makes the current stream wait for `layers[index]`; on a CPU it blocks the caller."""
        self._launched[index].wait()
        event = self._copied[index]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)  # an event that was never recorded is not waited for


class LayerWaits:
    """The loads that one step may read, and how far it has waited for each of them."""

    def __init__(self, loads: Sequence[LayerwiseLoad]) -> None:
        self._loads = list(loads)
        self._next = [0] * len(self._loads)

    def before(self, layer: int) -> None:
        """Waits for everything that the layers up to `layer` read; with FIRST, for what the step reads before them."""
        for number, load in enumerate(self._loads):
            while self._next[number] < len(load.layers) and load.layers[self._next[number]] <= layer:
                load.wait(self._next[number])
                self._next[number] += 1

    def finish(self) -> None:
        """Waits for the rest: what draft models read, and layers that the step did not reach."""
        for number, load in enumerate(self._loads):
            for index in range(self._next[number], len(load.layers)):
                load.wait(index)
            self._next[number] = len(load.layers)
