"""The buffers of experts that the layers of a model use in turn (`expert_slots`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class ExpertBuffers:
    """What the layers whose experts lie in main memory share: buffers in GPU memory for all experts of a layer, in
    each form that layers have, and the stream of copies that are made ahead of a layer."""

    layers: list[Any] = field(default_factory=list)
    """The layers, each an `ExpertSlots`, in the order of a step."""
    by_form: dict[object, list[Any]] = field(default_factory=dict)
    copied_ahead: dict[int, int] = field(default_factory=dict)
    """Buffer -> the layer all of whose experts were copied there ahead, in this step."""
    arrived: list[torch.cuda.Event] = field(default_factory=list)
    """Events by buffer, after these copies."""
    stream: torch.cuda.Stream | None = None

    def totals(self) -> tuple[int, int] | None:
        """Returns how many experts steps chose that computed with slots, and how many of these had to be copied; None
        without such layers. Waits for the device."""
        if not self.layers:
            return None
        asked, copied = torch.stack([layer.tables.totals for layer in self.layers]).sum(0).tolist()
        return asked, copied

    def join(self, layer: object, device: torch.device | None) -> int:
        """Adds a layer and returns its number. device: where copies may be made ahead; None: they are not."""
        self.layers.append(layer)
        if device is not None and device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
            self.arrived = [torch.cuda.Event() for _ in range(2)]
        return len(self.layers) - 1

    def of_form(self, form: object, make: Callable[[], list[Any]]) -> list[Any]:
        """Returns the buffers of layers whose tensors have this form, which the first of them makes."""
        if form not in self.by_form:
            self.by_form[form] = make()
        return self.by_form[form]
