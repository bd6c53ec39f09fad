"""Finds out whether a class mixes neighbouring tokens outside of attention, from the operations of a run without
weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Convolutions(TorchDispatchMode):
    """Notes whether any convolution sees several places of its input, as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation."""
        if function is torch.ops.aten.convolution.default:
            self.mixes |= any(size > 1 for size in args[1].shape[2:])
        return function(*args, **(kwargs or {}))
