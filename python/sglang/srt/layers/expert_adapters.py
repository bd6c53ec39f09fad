"""LoRA adapters of a layer's experts: A and B of all of them in slots, for both products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.configs.adapters.files import AdapterPair
from sglang.srt.errors import UserError
from sglang.srt.layers.adapter_memory import AdapterMemory, HostAdapter
from sglang.srt.layers.moe.pair_adapters import Kernels, PairAdapters
from sglang.srt.layers.native_adapters import ExpertAdapterWeights, empty_slot
from sglang.srt.plan.ranks import ShardRange

EXPERT_MODULE = re.compile(r"(?P<experts>.+\.experts)(?:\.(?P<number>\d+))?\.(?P<name>\w+)")
"""A module of one expert, or of all of them."""
LAYER_OF = re.compile(r"(?:(?:model|backbone|language_model|llm)\.)*(layers\.(?P<number>\d+))\.")
"""A layer of the decoder in the name of a module."""
PARTS_OF: Mapping[str, tuple[str, ...]] = {
    "gate_proj": ("gate",), "w1": ("gate",), "up_proj": ("up",), "w3": ("up",), "down_proj": ("down",),
    "w2": ("down",), "gate_up_proj": ("gate", "up"),
}  # fmt: skip
"""Matrices of an expert by their names in adapters."""


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A rank's share of a matrix of each expert: `rows` and `cols` of its features, from row `begin` of the product on.
    `part`: gate, up or down."""

    part: str
    rows: ShardRange
    cols: ShardRange
    begin: int


@dataclass(frozen=True, slots=True)
class ProductRows:
    """A product of a layer's experts: "w13" or "w2", of matrices one below the other, [`rows`, `cols`] on a rank."""

    name: str
    matrices: tuple[ExpertMatrix, ...]
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of a layer. `count`: of all ranks; `local`: which of them a rank has; `places`: in its tensors, with
    a shared expert and padding. `alternating`: where gate and up are one tensor, gate's rows are the even ones."""

    count: int
    local: slice
    places: int
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """A and B of one product of a layer's experts, in slots."""

    number: int
    product: ProductRows
    weights: ExpertAdapterWeights

    def empty(self, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zeros in main memory in the form of a slot's A and B."""
        return empty_slot(self.weights.a, self.weights.b, pinned)


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """What an adapter changes of a layer's experts. `module`: one of PARTS_OF; `expert`: the only one, None: all."""

    experts: AdapterExperts
    module: str
    expert: int | None

    def is_exchanged(self, pair: AdapterPair) -> bool:
        """Returns whether the sizes of a pair say that A and B stand in each other's places."""
        return self.experts.is_exchanged(self.module, pair)

    def put(self, adapter: HostAdapter, pair: AdapterPair, a: torch.Tensor, b: torch.Tensor, pinned: bool) -> None:
        """Puts this rank's share of a file's A and B into an adapter."""
        self.experts.put(adapter, self, pair, a, b, pinned)


class AdapterExperts:
    """A and B of a layer's experts, in slots."""

    def __init__(
        self,
        layers: AdapterMemory,
        kernels: Kernels,
        layer: LayerExperts,
        products: Sequence[ProductRows],
    ) -> None:
        self.layers, self.layer = layers, layer
        self.kernels = kernels
        self.products: list[ExpertSlots] = []
        for product in products:
            if layers.plan.serves_experts(matrix.part for matrix in product.matrices):
                self.products.append(self._slots(product))

    def of_step(self) -> PairAdapters | None:
        """Returns what adapters add in the step that is computed; None: no token has one."""
        tokens = self.layers.tokens
        if tokens is None:
            return None
        weights = {each.product.name: each.weights for each in self.products}
        return PairAdapters(self.kernels, tokens.slots, weights.get("w13"), weights.get("w2"))

    def check(self, module: str, pair: AdapterPair, source: str) -> None:
        """Raises UserError if the sizes of an adapter are not those of the experts, or no slots are for them."""
        rows, cols = self._shape(module)
        if not rows:
            raise UserError(f"{source} is not served: it is none of --lora-target-modules, or the experts lack it.")
        sizes = pair.outputs, pair.inputs
        if sizes != (rows, cols) and not self.is_exchanged(module, pair):
            raise UserError(
                f"{source} is of {list(sizes)}, but the model's is of {[rows, cols]}. Was the adapter made for another"
                " model?"
            )
        if pair.experts not in (0, 1, self.layer.count):
            raise UserError(f"{source} is of {pair.experts} experts; the model has {self.layer.count}.")
        outer = pair.shares_b if PARTS_OF[module] == ("down",) else pair.shares_a
        if self.layers.plan.shared_outer and not outer:
            raise UserError(
                f"{source} is of each expert, but the server keeps one for all (--experts-shared-outer-loras): start it"
                " with --no-experts-shared-outer-loras."
            )

    def is_exchanged(self, module: str, pair: AdapterPair) -> bool:
        """Returns whether a flat pair has the sizes of A and B in each other's places. Older versions of PEFT took the
        outputs of parameters [E, out, in] for inputs. Where both are equal nothing tells."""
        rows, cols = self._shape(module)
        return pair.flat and rows != cols and (pair.outputs, pair.inputs) == (cols, rows)

    def _shape(self, module: str) -> tuple[int, int]:
        """Returns the rows and columns of what an adapter calls `module` in each expert; zeros without slots."""
        names = PARTS_OF[module]
        shards = [matrix for slots in self.products for matrix in slots.product.matrices if matrix.part in names]
        return sum(shard.rows.total for shard in shards), shards[0].cols.total if shards else 0

    def put(
        self,
        adapter: HostAdapter,
        place: ExpertPlace,
        pair: AdapterPair,
        a: torch.Tensor,
        b: torch.Tensor,
        pinned: bool,
    ) -> None:
        """Puts this rank's share of a file's A and B into an adapter."""
        names = PARTS_OF[place.module]
        a, b = unpacked(pair, a, b)
        for stored, mine in self._runs(place.expert):
            some_a, some_b = (side[stored] if len(side) > 1 else side for side in (a, b))
            for slots in self.products:
                parts = [(i, matrix) for i, matrix in enumerate(slots.product.matrices) if matrix.part in names]
                if parts:
                    self._put(adapter, slots, parts, mine, some_a, some_b, pinned)

    def _put(
        self,
        adapter: HostAdapter,
        slots: ExpertSlots,
        parts: Sequence[tuple[int, ExpertMatrix]],
        experts: slice,
        a: torch.Tensor,
        b: torch.Tensor,
        pinned: bool,
    ) -> None:
        if slots.number not in adapter.matrices:
            adapter.matrices[slots.number] = slots.empty(pinned)
        whole_a, whole_b = adapter.matrices[slots.number]
        at_a, at_b = (experts if len(side) > 1 else slice(0, 1) for side in (whole_a, whole_b))
        rank = a.shape[1]
        for (i, matrix), of_part in zip(parts, self._rows_of_parts(b, len(parts)), strict=True):
            whole_a[at_a, i, :rank, : matrix.cols.count] = a[:, :, matrix.cols.run]
            rows = slice(matrix.begin, matrix.begin + matrix.rows.count)
            whole_b[at_b, rows, :rank] = of_part[:, matrix.rows.run]
        adapter.ranks[slots.number, 0] = max(int(adapter.ranks[slots.number, 0]), rank)

    def _runs(self, expert: int | None) -> Iterator[tuple[slice, slice]]:
        """Yields which of a pair's experts this rank has, and their places in its tensors. expert: the only one
        that the pair is of; the one behind the last is the shared expert."""
        local = self.layer.local
        if expert is None:
            yield local, slice(0, local.stop - local.start)
        elif expert == self.layer.count:
            yield slice(0, 1), slice(expert, expert + 1)
        elif local.start <= expert < local.stop:
            yield slice(0, 1), slice(expert - local.start, expert - local.start + 1)

    def _rows_of_parts(self, b: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Returns the rows of B [E, rows, r] of each of `count` matrices."""
        if count == 1:
            return [b]
        return [b[:, i::count] for i in range(count)] if self.layer.alternating else b.chunk(count, dim=1)

    def _slots(self, product: ProductRows) -> ExpertSlots:
        layers, experts = self.layers, self.layer.places
        plan, device, dtype = layers.plan, layers.device, layers.dtype
        outer = [plan.shared_outer and product.name == name for name in ("w13", "w2")]
        with_a, with_b = (1 if shared else experts for shared in outer)
        number, parts_a = len(layers.linears), len(product.matrices)
        height = product.rows // parts_a
        assert [matrix.begin for matrix in product.matrices] == [i * height for i in range(parts_a)]
        parts = torch.arange(parts_a, dtype=torch.int32).repeat_interleave(height)
        weights = ExpertAdapterWeights(
            torch.zeros((plan.slots, with_a, parts_a, plan.room, product.cols), dtype=dtype, device=device),
            torch.zeros((plan.slots, with_b, product.rows, plan.room), dtype=dtype, device=device),
            layers.ranks[number],
            parts.to(device),
            experts,
        )
        layers.linears.append(weights)
        return ExpertSlots(number, product, weights)


def unpacked(pair: AdapterPair, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [E, r, in] and B [E, out, r] of experts from the tensors of a file. Of a flat pair the ranks of A lie
    expert by expert, and in B the experts rank by rank."""
    if not pair.experts:
        return a[None], b[None]
    if not pair.flat:
        return a, b
    of_experts = a.unflatten(0, (pair.experts, pair.rank))
    by_expert = b.unflatten(1, (pair.rank, pair.experts)).permute(2, 0, 1)
    return (by_expert.mT, of_experts.mT) if pair.exchanged else (of_experts, by_expert)
