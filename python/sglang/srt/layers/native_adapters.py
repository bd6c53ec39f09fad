"""LoRA adapters of a linear layer in plain torch: the CPU kernel, and the reference for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A and B of a linear layer [N, K] for S adapters, each in a slot. The layer's rows may belong to several modules
    (q, k and v), its parts.

        a: [S, P, R, K], of each of P parts; rows behind the rank are not read
        b: [S, N, R], times the adapter's factor; columns behind the rank are not read
        ranks: [S] int32, the largest rank of a part; 0: the adapter leaves the layer alone
        parts: [N] int32, the part that each row belongs to
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    parts: torch.Tensor


def add_adapters(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, weights: AdapterWeights) -> None:
    """Adds B A x of each token's adapter to out [T, N], x [T, K]. slots [T] int32: the slot of its adapter counted from
    1; 0: none."""
    for slot in range(1, len(weights.ranks) + 1):
        rank, rows = int(weights.ranks[slot - 1]), torch.nonzero(slots == slot).flatten()
        if not rank or not len(rows):
            continue
        inputs = x[rows].float()
        for part in range(weights.a.shape[1]):
            cols = torch.nonzero(weights.parts == part).flatten()
            low = (inputs @ weights.a[slot - 1, part, :rank].float().T).to(weights.b.dtype).float()
            delta = low @ weights.b[slot - 1][cols, :rank].float().T
            out[rows[:, None], cols] = (out[rows[:, None], cols].float() + delta).to(out.dtype)
