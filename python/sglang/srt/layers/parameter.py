"""Parameters: where each tensor of a checkpoint goes.

A parameter is a plain tensor made of parts. Each part is one tensor of the checkpoint, of which this rank holds a
slice: `qkv` of rank 1 is the second half of the rows of `q`, `k` and `v`, one below the other. The loader reads parts,
so that sharding and merging are stated once, by the layer that owns the parameter. Of linear layers a QuantMethod
makes the parameters: the seam where quantization formats enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from sglang.srt.distributed.parallel_state import Groups
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.layer_spec import Matrix
from sglang.srt.plan.ranks import ShardRange
from sglang.srt.plan.weight_names import PartKey, WeightMap

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

Index: TypeAlias = tuple[int | slice, ...]
Apply: TypeAlias = Callable[[Activations], torch.Tensor]
Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Fill: TypeAlias = Callable[[torch.Tensor, torch.Generator], None]

FLOATS = ("F64", "F32", "F16", "BF16")
"""Names in safetensors of the types that an unquantized weight may be stored in."""


class Init(Enum):
    """Initial values of a dummy parameter; a function may fill it otherwise."""

    NORMAL = "normal"
    ONES = "ones"
    ZEROS = "zeros"


def constant(value: float) -> Fill:
    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def random_codes(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Any code of an 8-bit type, or two of a 4-bit type; of e4m3 none that is NaN."""
    codes = tensor.view(torch.uint8)
    codes.random_(0, 256, generator=generator)
    if tensor.dtype == torch.float8_e4m3fn:
        codes.bitwise_and_(0xFE)  # NaN is the largest code of either sign


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor, or a piece of one: the tensor's whole shape, the slice that this rank holds, and where in
    the parameter it goes.

    `dtypes` are the types that it may be stored in, as safetensors names them. `convert` makes what the parameter holds
    of what was read (bytes of packed words, a reciprocal); the number of elements must then be that of `dest`. A
    checkpoint may lack an `optional` part: the parameter keeps what a dummy one holds. `other`: the same of a tensor of
    another shape, which some writers store instead; where both have one shape, this part counts.
    """

    shape: tuple[int, ...]
    source: tuple[slice, ...] = ()
    dest: Index = ()
    dtypes: tuple[str, ...] = FLOATS
    convert: Convert | None = None
    optional: bool = False
    other: TensorPart | None = None

    @property
    def sharded(self) -> bool:
        return any(s.indices(n)[:2] != (0, n) for s, n in zip(self.source, self.shape, strict=False))


@dataclass(slots=True)
class Param:
    """`name` is a dotted path whose last piece (weight, bias) is the checkpoint's too."""

    name: str
    tensor: torch.Tensor
    parts: dict[PartKey, TensorPart]
    init: Init | Fill = Init.NORMAL

    @property
    def sharded(self) -> bool:
        return any(part.sharded for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part [rows, cols] of the checkpoint weight `part` [out features, in features]; `piece` numbers
    several of one weight."""

    part: str
    rows: ShardRange
    cols: ShardRange
    piece: int = 0

    @property
    def padded(self) -> bool:
        return self.rows.padded or self.cols.padded

    @property
    def key(self) -> PartKey:
        return PartKey(self.part, piece=self.piece)


def zeroed_behind(shards: Iterable[WeightShard], tensor: torch.Tensor) -> torch.Tensor:
    """Sets the tensor to zero where shares have more room than this rank holds: no checkpoint tensor fills all of
    it."""
    if any(shard.padded for shard in shards) and not tensor.is_meta:
        tensor.zero_()
    return tensor


def share_param(
    scope: Scope, leaf: str, share: ShardRange, init: Init, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A parameter [room of the share] of a checkpoint's vector; zeros behind what this rank holds."""
    part = TensorPart((share.total,), (share.run,), (slice(0, share.count),))
    tensor = scope.param(leaf, (share.padded_count,), {PartKey(): part}, init, dtype)
    if not tensor.is_meta:
        tensor[share.count :].zero_()
    return tensor


class QuantMethod(Protocol):
    """Method by which linear weights are stored and multiplied."""

    def create_weights(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        """Allocate the weights of `shards` stacked by rows in `scope`, and return x [T, in] -> [T, out] (+ bias)."""

    def create_dequantized(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        """The same with weights that are held in the model's type, however the checkpoint stores them."""

    def create_head(self, scope: Scope, shard: WeightShard) -> Apply | None:
        """The same of an output head, whose logits [T, out] are fp32; None: the checkpoint has it in 16 bits."""

    def create_unpacked(self, scope: Scope, shard: WeightShard, take: Callable[[torch.Tensor], None]) -> None:
        """Allocate the weight of `shard` in `scope`. `take` gets it as [rows, cols] in the model's type, however the
        checkpoint stores it: for a block that multiplies it in a way of its own."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Environment that layers are built in: the plan, the groups of ranks, the place of the weights, and a path that
    names them.

    `on_other_ranks` collects the names of checkpoint tensors that other ranks hold, `caches` the stores that blocks ask
    for, `finish` what is left to do once the parameters are filled (scales folded, weights repacked).
    """

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    groups: Groups
    quant: QuantMethod
    weights: WeightMap
    path: str = ""
    params: dict[str, Param] = field(default_factory=dict)
    on_other_ranks: set[str] = field(default_factory=set)
    caches: list[CacheStore] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    first_layer: int = 0
    """Caches are numbered from there: a draft's behind the layers of its target."""
    readable: tuple[CacheStore, ...] = ()
    """Stores of another model that layers may read: a draft those of its target."""

    def sub(self, name: str | int) -> Scope:
        """The scope of a child; parameters land in the same collection."""
        path = f"{self.path}.{name}" if self.path else str(name)
        return replace(self, path=path)

    def matrix(self) -> Matrix:
        """Returns what a rank holds of the weights at this path, according to the description."""
        _, layer, name = self.path.split(".", 2)
        return self.plan.weights.matrix(int(layer), name)

    def module(self, part: str = "", expert: int = 0) -> str:
        """Returns the checkpoint's name of the module that has this part."""
        return self.weights.checkpoint_name(f"{self.path}.weight", PartKey(part, expert)).removesuffix(".weight")

    def cache(self, layer_id: int, name: str) -> CacheStore:
        """The store of a cache that the layer's description names; empty until the pools are allocated. A layer may ask
        for that of an earlier one."""
        layer_id += self.first_layer
        for store in (*self.readable, *self.caches):
            if (store.layer_id, store.name) == (layer_id, name):
                return store
        store = CacheStore(layer_id, name)
        self.caches.append(store)
        return store

    def param(
        self,
        leaf: str,
        shape: tuple[int, ...],
        parts: dict[PartKey, TensorPart] | None = None,
        init: Init | Fill = Init.NORMAL,
        dtype: torch.dtype | None = None,
        pinned: bool = False,
    ) -> torch.Tensor:
        """Allocate and record a parameter [shape]. Without `parts` it is one checkpoint tensor, held whole; where
        there are none in them, something else fills it. With `pinned` it lies in main memory, where a GPU can read
        it."""
        name = f"{self.path}.{leaf}"
        assert name not in self.params, f"parameter {name} exists already"
        dtype = dtype or self.dtype
        if pinned and self.device.type == "cuda":
            tensor = _pinned(shape, dtype)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.params[name] = Param(name, tensor, {PartKey(): TensorPart(shape)} if parts is None else parts, init)
        return tensor


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates in pinned host memory. Raises UserError where there is not as much."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = torch.Size(shape).numel() * dtype.itemsize / 1024**3
        raise UserError(
            f"{size:.2f} GiB of host memory cannot be pinned for a table of n-grams ({error}). Free memory of the"
            " machine, raise its limit of locked memory (ulimit -l), or start with more GPUs and"
            " --no-ple-offload-embedding."
        ) from None
