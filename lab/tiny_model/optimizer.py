"""Muon for matrices, Adam for the rest.

Muon (K. Jordan, 2024) moves a matrix by the orthogonal part of its momentum, so that all directions learn at one rate;
the weights come out without outliers, which is also what coarse number formats want.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MUON_LR = 0.02
ADAM_LR = 2e-3
ADAM_DECAY = 0.1
ADAM_EPS = 1e-8
"""Not less: words that no answer has get tiny gradients, which must not become full steps."""
MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that drives singular values to about one, from the same source."""


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """[N, R, C] with R <= C -> about U V^T of each, in the inputs' type."""
    a, b, c = NEWTON_SCHULZ
    work = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(work)
    x = x / (x.flatten(1).float().norm(dim=1).view(-1, 1, 1) + 1e-7).to(work)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.to(matrices.dtype)


class Optimizer:
    """Both, over one model. `step(scale)` uses the peak rates times `scale`."""

    def __init__(self, model: torch.nn.Module, muon_moves: Callable[[str], bool] | None = None) -> None:
        """muon_moves: which parameters, by name, are matrices for Muon (None: as `is_matrix` says)."""
        named, muon_moves = dict(model.named_parameters()), muon_moves or is_matrix
        self._matrices = {n: p for n, p in named.items() if muon_moves(n)}
        self._momentum = {n: torch.zeros_like(p) for n, p in self._matrices.items()}
        others = [p for n, p in named.items() if not muon_moves(n)]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": ADAM_DECAY},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.95), eps=ADAM_EPS)

    def step(self, scale: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = ADAM_LR * scale
        self._adam.step()
        self._muon_step(MUON_LR * scale)

    @torch.no_grad()
    def _muon_step(self, lr: float) -> None:
        """Matrices of one shape go together: a model of this size is hundreds of small ones."""
        stacks: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for name, parameter in self._matrices.items():
            if parameter.grad is None:
                continue
            momentum = self._momentum[name]
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            flat = _wide(update.view(-1, *update.shape[-2:]))
            stacks.setdefault(tuple(flat.shape[1:]), []).append((name, flat))
        for entries in stacks.values():
            updates = orthogonal(torch.cat([flat for _, flat in entries]))
            for (name, _), update in zip(entries, updates.split([len(f) for _, f in entries]), strict=True):
                parameter = self._matrices[name]
                rows, columns = parameter.shape[-2:]
                if rows > columns:
                    update = update.mT
                rate = lr * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - lr * WEIGHT_DECAY).sub_(update.reshape(parameter.shape), alpha=rate)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._matrices.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        for name, momentum in self._momentum.items():
            momentum.copy_(state["momentum"][name])


def is_matrix(name: str) -> bool:
    """Whether a parameter is a projection; the embedding, the router and the norms are Adam's."""
    return name.rpartition(".")[2] in ("q", "k", "v", "o", "gate", "up", "down")


def _wide(matrices: Tensor) -> Tensor:
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
