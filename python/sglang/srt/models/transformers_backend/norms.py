"""Finds the RMS norms of a class, which are known by their values and not by their names."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch

from sglang.srt.plan.transformers_backend.facts import NormFact

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_SCALES = (1.0, 1e-3)
"""Sizes of inputs: beside small ones the epsilon shows."""


class NormFinder:
    """Says of modules whether they are RMS norms. It computes each kind of them once, with random values."""

    def __init__(self) -> None:
        self._known: dict[Any, NormFact | None] = {}

    def norm_of(self, module: torch.nn.Module) -> NormFact | None:
        """Returns what a module computes if that is an RMS norm over the last dim with one weight, else None."""
        weights = [*module._parameters.items()]
        if "Norm" not in type(module).__name__ or len(weights) != 1 or weights[0][0] != "weight":
            return None
        weight = weights[0][1]
        epsilons = [float(vars(module)[name]) for name in _EPSILONS if isinstance(vars(module).get(name), float)]
        if weight is None or weight.dim() != 1 or len(epsilons) != 1 or module._buffers or module._modules:
            return None
        key = (type(module), len(weight), epsilons[0])
        if key not in self._known:
            self._known[key] = None
            with suppress(Exception):  # the class is code that we did not write
                self._known[key] = _by_values(module, len(weight), epsilons[0])
        return self._known[key]


def _by_values(module: torch.nn.Module, size: int, eps: float) -> NormFact | None:
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = torch.nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)
    probe._parameters["weight"] = weight
    inputs = [scale * torch.randn(1, 3, size) for scale in _SCALES]
    for plus_one in (False, True):
        factor = weight + 1.0 if plus_one else weight
        expected = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor for x in inputs]
        if all(torch.allclose(probe(x), y, rtol=1e-4, atol=1e-6) for x, y in zip(inputs, expected, strict=True)):
            return NormFact(eps, plus_one)
    return None
