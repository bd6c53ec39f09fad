"""Parameters, and how checkpoint tensors map to them.

A parameter is a plain tensor made of parts. Each part is one checkpoint tensor, of which this rank holds a slice: `qkv`
of rank 1 is the second half of the rows of `q`, `k` and `v`, stacked. The loader reads parts, so sharding and merging
are stated once, by the layer that owns the parameter. A QuantMethod creates the parameters of linear layers, and is
where quantization formats plug in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from sglang.srt.distributed.groups import Groups
from sglang.srt.errors import UserError
from sglang.srt.layers.moe.cpu_experts.shared import CpuExperts
from sglang.srt.layers.moe.expert_buffers import ExpertBuffers
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.mem_cache.node_memory import ANYWHERE, RowNodes, map_on_nodes
from sglang.srt.plan.ranks import ShardRange
from sglang.srt.plan.weight_names import PartKey, WeightMap
from sglang.srt.plan.weight_spec import Matrix

if TYPE_CHECKING:
    from sglang.srt.layers.adapters import AdapterLayers
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
    """Returns a function that fills a dummy parameter with `value`."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.fill_(value)

    return fill


def random_codes(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a dummy parameter with random codes of an 8-bit type, or of two values of a 4-bit type; never e4m3 NaN."""
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
        """Returns whether this rank holds only a slice of the tensor."""
        return any(s.indices(n)[:2] != (0, n) for s, n in zip(self.source, self.shape, strict=False))


@dataclass(slots=True)
class Param:
    """A parameter. `name` is a dotted path whose last component (weight, bias) is also the checkpoint's."""

    name: str
    tensor: torch.Tensor
    parts: dict[PartKey, TensorPart]
    init: Init | Fill = Init.NORMAL
    filled_on: torch.device | None = None
    """Device that makes the random numbers of a dummy parameter; None: the tensor's."""

    @property
    def sharded(self) -> bool:
        """Returns whether this rank holds only slices of the checkpoint's tensors."""
        return any(part.sharded for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part [rows, cols] of checkpoint weight `part` [out features, in features]; `piece` numbers several
    slices of one weight."""

    part: str
    rows: ShardRange
    cols: ShardRange
    piece: int = 0

    @property
    def padded(self) -> bool:
        """Returns whether the shard has padding rows or columns."""
        return self.rows.padded or self.cols.padded

    @property
    def key(self) -> PartKey:
        """Returns the key of the shard's part of a parameter."""
        return PartKey(self.part, piece=self.piece)


def zeroed_behind(shards: Iterable[WeightShard], tensor: torch.Tensor) -> torch.Tensor:
    """Zeroes the tensor, and returns it, if the shards are padded, since checkpoint tensors then do not fill all of
    it."""
    if any(shard.padded for shard in shards) and not tensor.is_meta:
        tensor.zero_()
    return tensor


def share_param(
    scope: Scope, leaf: str, share: ShardRange, init: Init, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns a parameter [padded share] for a checkpoint's vector, zero behind the values that this rank holds."""
    part = TensorPart((share.total,), (share.run,), (slice(0, share.count),))
    tensor = scope.param(leaf, (share.padded_count,), {PartKey(): part}, init, dtype)
    if not tensor.is_meta:
        tensor[share.count :].zero_()
    return tensor


class QuantMethod(Protocol):
    """A method to store and multiply linear weights."""

    def create_weights(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        """Allocates the weights of `shards`, stacked by rows, in `scope`; returns the product x [T, in] -> [T, out] (+
        bias)."""

    def create_dequantized(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        """Does as `create_weights` with weights held in the model's dtype, even if the checkpoint quantizes them."""

    def create_head(self, scope: Scope, shard: WeightShard) -> Apply | None:
        """Does as `create_weights` for an output head with fp32 logits [T, out]; returns None if the checkpoint stores
        the head in 16 bits."""

    def create_unpacked(self, scope: Scope, shard: WeightShard, take: Callable[[torch.Tensor], None]) -> None:
        """Allocates the weight of `shard` in `scope` and passes it to `take` as [rows, cols] in the model's dtype, even
        if the checkpoint quantizes it; for blocks with a multiplication of their own."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The environment in which layers are built: plan, rank groups, device, weight names, and a path for names.

    It collects in `on_other_ranks` the names of checkpoint tensors that other ranks hold, in `caches` the cache stores
    that blocks need, and in `finish` functions to call after loading (fold scales, repack weights).
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
    """Number of the first layer's caches: a draft's follow those of its target."""
    readable: tuple[CacheStore, ...] = ()
    """Stores of another model that layers may read, such as the target's for a draft."""
    buffers: ExpertBuffers = field(default_factory=ExpertBuffers)
    """Buffers of experts whose weights lie in main memory."""
    adapters: AdapterLayers | None = None
    """Memory for LoRA adapters of linear layers; None: there is none."""
    cpu_experts: CpuExperts = field(default_factory=CpuExperts)
    """CPUs that compute some of these."""
    made_for: torch.device | None = None
    """Device that reads the parameters if they lie in main memory."""
    row_nodes: RowNodes = ANYWHERE
    """Nodes of main memory among which their rows are then divided."""

    def in_main_memory(self) -> Scope:
        """Returns the scope with parameters in main memory, each on pages of its own, and on the nodes of the CPUs that
        compute with them."""
        if self.device.type == "meta":
            return self
        nodes = RowNodes(self.cpu_experts.nodes)
        return replace(self, device=torch.device("cpu"), made_for=self.device, row_nodes=nodes)

    def sub(self, name: str | int) -> Scope:
        """Returns the scope of a child; its parameters go into the same collection."""
        path = f"{self.path}.{name}" if self.path else str(name)
        return replace(self, path=path)

    def matrix(self) -> Matrix:
        """Returns the description of this rank's part of the weights at this path."""
        _, layer, name = self.path.split(".", 2)
        return self.plan.weights.matrix(int(layer), name)

    def module(self, part: str = "", expert: int = 0) -> str:
        """Returns the checkpoint's name of the module with this part."""
        return self.weights.checkpoint_name(f"{self.path}.weight", PartKey(part, expert)).removesuffix(".weight")

    def cache(self, layer_id: int, name: str) -> CacheStore:
        """Returns the store of a cache that the layer's description names; empty until the pools are allocated. May be
        an earlier layer's."""
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
        """Allocates and registers a parameter [shape]. Without `parts` it is one checkpoint tensor held completely;
        with empty `parts` other code fills it. pinned: allocates it in host memory that the GPU can read."""
        name = f"{self.path}.{leaf}"
        assert name not in self.params, f"parameter {name} exists already"
        dtype = dtype or self.dtype
        if pinned and self.device.type == "cuda":
            tensor = _pinned(shape, dtype)
        elif self.made_for is not None:
            tensor = _mapped(shape, dtype, self.row_nodes)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        parts = {PartKey(): TensorPart(shape)} if parts is None else parts
        self.params[name] = Param(name, tensor, parts, init, self.made_for)
        return tensor


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, placed: RowNodes) -> torch.Tensor:
    """Allocates main memory that is alone on its pages. Raises UserError if there is not enough."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        return map_on_nodes(shape, dtype, placed)
    except OSError as error:
        raise UserError(
            f"{size / 1024**3:.2f} GiB of main memory cannot be had for the experts of a layer ({error}). Free memory"
            " of the machine, raise the container's limit, or keep experts in the memory of more GPUs (--tp-size)."
        ) from None


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates pinned host memory. Raises UserError if there is not enough."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = torch.Size(shape).numel() * dtype.itemsize / 1024**3
        raise UserError(
            f"{size:.2f} GiB of host memory cannot be pinned for a table of embeddings ({error}). Free memory of the"
            " machine, raise its limit of locked memory (ulimit -l), or start without --embed-in-main-memory, or with"
            " more GPUs and --no-ple-offload-embedding."
        ) from None
