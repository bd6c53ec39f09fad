"""LoRA adapters of a linear layer in plain torch: the CPU kernel, and the reference for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Prepare = TypeVar("Prepare")
Order = TypeVar("Order")
Shrink = TypeVar("Shrink")
Expand = TypeVar("Expand")


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A and B of a linear layer [N, K] for S adapters, each in a slot. The layer's rows may belong to several modules
    (q, k and v), its parts.

        a: [S, P, R, K], of each of P parts; rows behind the rank are not read
        b: [S, N, R], times the adapter's factor; columns behind the rank are not read
        ranks: [S] int32, the largest rank of a part; 0: the adapter leaves the layer alone
        parts: [N] int32, the part that each row belongs to
        tiles: what a kernel's `prepare` has made of them
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    parts: torch.Tensor
    tiles: Any = None


@dataclass(frozen=True, slots=True)
class AdapterKernels(Generic[Prepare, Order, Shrink, Expand]):
    """What is prepared for a layer's weights, how the tokens of a step are ordered by adapter once for all layers, and
    the two products of a layer, A x and B times that, with the types of those here."""

    prepare: Prepare
    order: Order
    shrink: Shrink
    expand: Expand


def prepare_adapters(weights: AdapterWeights) -> AdapterWeights:
    """Returns the weights with what the kernels need beside them: nothing."""
    return weights


def order_tokens(slots: torch.Tensor, num_slots: int) -> Any:
    """Returns what `shrink` and `expand` take of a step's tokens: here the slots as they are. slots [T] int32: the slot
    of a token's adapter counted from 1; 0: none."""
    return slots


def shrink(x: torch.Tensor, slots: Any, weights: AdapterWeights) -> torch.Tensor:
    """Returns A x of each token's adapter, [T, P, R], in the type of B; x [T, K]."""
    low = torch.zeros((len(x), *weights.a.shape[1:3]), dtype=weights.b.dtype, device=x.device)
    for slot, rank, rows in _each_adapter(slots, weights):
        for part in range(weights.a.shape[1]):
            low[rows, part, :rank] = (x[rows].float() @ weights.a[slot, part, :rank].float().T).to(low.dtype)
    return low


def expand(low: torch.Tensor, out: torch.Tensor, slots: Any, weights: AdapterWeights) -> None:
    """Adds B times `shrink`'s result to out [T, N]."""
    for slot, rank, rows in _each_adapter(slots, weights):
        for part in range(weights.a.shape[1]):
            cols = torch.nonzero(weights.parts == part).flatten()
            delta = low[rows, part, :rank].float() @ weights.b[slot][cols, :rank].float().T
            out[rows[:, None], cols] = (out[rows[:, None], cols].float() + delta).to(out.dtype)


def _each_adapter(slots: torch.Tensor, weights: AdapterWeights) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields the slot, counted from 0, the rank and the tokens of each adapter that changes the layer."""
    for slot, rank in enumerate(weights.ranks.tolist()):
        rows = torch.nonzero(slots == slot + 1).flatten()
        if rank and len(rows):
            yield slot, rank, rows


def add_adapters(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, weights: AdapterWeights) -> None:
    """Adds B A x of each token's adapter to out [T, N], x [T, K]. slots: as in `order_tokens`."""
    expand(shrink(x, slots, weights), out, slots, weights)


ADAPTERS = AdapterKernels(prepare_adapters, order_tokens, shrink, expand)
