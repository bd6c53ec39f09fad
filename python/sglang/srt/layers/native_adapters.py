"""LoRA adapters of linear layers and of experts in plain torch: the CPU kernels, and the references for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Prepare = TypeVar("Prepare")
Order = TypeVar("Order", covariant=True)
Shrink = TypeVar("Shrink")
LookUp = TypeVar("LookUp")
Expand = TypeVar("Expand")
Add = TypeVar("Add", covariant=True)


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
class AdapterKernels(Generic[Prepare, Order, Shrink, LookUp, Expand]):
    """What is prepared for a layer's weights, how the tokens of a step are ordered by adapter once for all layers, and
    the two products of a layer, A x (in an embedding a column of A) and B times that, with the types of those here."""

    prepare: Prepare
    order: Order
    shrink: Shrink
    look_up: LookUp
    expand: Expand


def prepare_adapters(weights: AdapterWeights) -> AdapterWeights:
    """Returns the weights with what the kernels need beside them: nothing."""
    return weights


def order_tokens(slots: torch.Tensor, num_slots: int) -> Any:
    """Returns what `shrink` and `expand` take of a step's tokens: here the slots as they are. slots [T] int32: the slot
    of a token's adapter counted from 1; 0: none."""
    return slots


def shrink(x: torch.Tensor, ordered: Any, weights: AdapterWeights, aside: bool = False) -> torch.Tensor:
    """Returns A x of each token's adapter, [T, P, R], in the type of B; x [T, K]. aside: on a stream beside others."""
    low = torch.zeros((len(x), *weights.a.shape[1:3]), dtype=weights.b.dtype, device=x.device)
    for slot, rank, rows in _each_adapter(ordered, weights):
        for part in range(weights.a.shape[1]):
            low[rows, part, :rank] = (x[rows].float() @ weights.a[slot, part, :rank].float().T).to(low.dtype)
    return low


def look_up(ids: torch.Tensor, first: int, ordered: Any, weights: AdapterWeights) -> torch.Tensor:
    """Returns `shrink`'s result for inputs that are 1 in one place, a token's id minus `first` [T], and 0 elsewhere or
    everywhere: column ids - first of A, zeros where A has no such column."""
    low = torch.zeros((len(ids), *weights.a.shape[1:3]), dtype=weights.b.dtype, device=ids.device)
    columns = ids - first
    here = (columns >= 0) & (columns < weights.a.shape[3])
    for slot, rank, rows in _each_adapter(ordered, weights):
        rows = rows[here[rows]]
        low[rows, 0, :rank] = weights.a[slot, 0, :rank][:, columns[rows]].T
    return low


def expand(low: torch.Tensor, out: torch.Tensor, ordered: Any, weights: AdapterWeights) -> None:
    """Adds B times `shrink`'s result to out [T, N]."""
    for slot, rank, rows in _each_adapter(ordered, weights):
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


@dataclass(frozen=True, slots=True)
class ExpertAdapterWeights:
    """A and B of one product of E experts [E, N, K] for S adapters, each in a slot. The rows may belong to several
    matrices (gate and up), the product's parts.

        a: [S, E, P, R, K], of each of P parts; rows behind the rank are not read
        b: [S, E, N, R], times the adapter's factor; columns behind the rank are not read
        ranks, parts: as in `AdapterWeights`; parts are equally high and lie one below the other

    A or B that all experts share have one expert, [S, 1, ...]. `num_experts`: E.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    parts: torch.Tensor
    num_experts: int

    def of(self, slot: int, expert: int) -> AdapterWeights:
        """Returns the weights of an adapter, its slot counted from 1, for an expert, as those of a layer with one
        slot."""
        a, b = (side[slot - 1 : slot, expert if side.shape[1] > 1 else 0] for side in (self.a, self.b))
        return AdapterWeights(a, b, self.ranks[slot - 1 : slot], self.parts)


@dataclass(frozen=True, slots=True)
class ExpertAdapterKernels(Generic[Order, Add]):
    """How the pairs of a layer are ordered once for both products, and what adds to a product, with the types of those
    here."""

    order: Order
    add: Add


def order_pairs(slots: torch.Tensor, ids: torch.Tensor, num_slots: int, num_experts: int) -> Any:
    """Returns what `add_to_pairs` takes of a layer's pairs: here both as they are. slots [T] int32: as in
    `order_tokens`; ids [T, k] int32: the experts, -1: none."""
    return slots, ids


def add_to_pairs(x: torch.Tensor, out: torch.Tensor, pairs: Any, weights: ExpertAdapterWeights) -> None:
    """Adds B A x of each pair of a token and an expert to out [T * k, N], x [T, K] of tokens or [T * k, K] of pairs."""
    slots, ids = pairs
    experts, adapters = ids.flatten(), slots.repeat_interleave(ids.shape[1])
    per_row = len(experts) // max(1, len(x))
    some = torch.nonzero((experts >= 0) & (adapters > 0)).flatten()
    present = torch.stack((adapters[some], experts[some]), dim=1)
    for slot, expert in torch.unique(present, dim=0).tolist():
        mine = some[(present == torch.tensor([slot, expert], device=present.device)).all(1)]
        rows = out[mine]
        add_adapters(x[mine // per_row], rows, torch.ones_like(mine), weights.of(slot, expert))
        out[mine] = rows


def empty_slot(a: torch.Tensor, b: torch.Tensor, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns zeros in main memory in the form of one slot of A and B [S, ...]."""
    one, other = (torch.zeros(side.shape[1:], dtype=side.dtype, pin_memory=pinned) for side in (a, b))
    return one, other


ADAPTERS = AdapterKernels(prepare_adapters, order_tokens, shrink, look_up, expand)
EXPERT_ADAPTERS = ExpertAdapterKernels(order_pairs, add_to_pairs)
