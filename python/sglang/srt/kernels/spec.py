"""The types of needs (what a call site asks for), kernels (what they offer) and choices. No torch, no device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.hardware.topology import Topology

Tile = Mapping[str, int]
"""Launch parameters of a tiled kernel: BLOCK_M, ..., num_warps, num_stages."""


@dataclass(frozen=True, slots=True)
class PeerLinks:
    """The probed links between a group's GPUs. `problem`: why no rank may write into another's memory; "": each may.
    `fusion_problem`: why FlashInfer's fused kernels, if they were asked for, cannot run."""

    topology: Topology
    problem: str = ""
    fusion_problem: str = ""
    library: Topology | None = None
    """The path that NCCL's (large) all-reduces take, where it differs from the links."""

    @property
    def library_topology(self) -> Topology:
        """Returns the kind of path that NCCL takes, which may differ from that between peers."""
        return self.topology if self.library is None else self.library


@dataclass(frozen=True, slots=True)
class Need:
    """What a call site asks of a kernel. Head dims are 0 where the op has none; `q_dtype` as in ModelConfig, `kv_dtype`
    that of the cache.

        traits: properties that not every kernel supports: "sliding_window", "sinks", "logit_cap", "custom_mask", "mla",
            "shared_kv", "sparse", "hybrid_gdn", "hybrid_mamba2", "bidirectional", "two_sided_window" (of a
            bidirectional op), "head_norm", "window_slack" (the cache keeps more than the window), "chunked" (windows
            are chunks), "relative_bias" (scores get a bias by distance), "expert_bias", "clamped_gate", "gelu_gate",
            "flashinfer_fusion" (asked for), "token_shares" (DCP: ranks shard the tokens and merge their partial
            attention), "uneven_sizes" (some sizes are no powers of two; only for ops that name it)
        heads: (query, KV) heads of a rank
        rotary_dim: dims of a head that rotate
        shapes: (rows, cols, has a bias) of a rank's weights: of linear layers, or of the experts' first and second
            product
        variant: tells needs of one op apart
        experts: (experts that a rank has room for, experts of a token, expert groups of ranks)
        ranks, links: of an all-reduce: number of ranks, and how their GPUs are linked (None: not probed)
        library_problem: the defect that a check on this GPU found in the library's kernel of the op
    """

    op: str
    head_dim: int = 0
    v_head_dim: int = 0
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_size: int = 1
    quant: str | None = None
    traits: frozenset[str] = frozenset()
    heads: tuple[int, int] = (0, 0)
    rotary_dim: int = 0
    shapes: tuple[tuple[int, int, bool], ...] = ()
    variant: str = ""
    experts: tuple[int, int, int] = (0, 0, 0)
    ranks: int = 1
    links: PeerLinks | None = None
    library_problem: str = ""

    @property
    def key(self) -> str:
        """Name of the need, unique within a model: linear layers have one for each quantization scheme, and an op has
        several where layers differ in shape."""
        parts = (self.op, self.quant if self.op == "linear" else None, self.variant)
        return "/".join(part for part in parts if part)

    def describe(self) -> str:
        """Describes dims, dtypes and traits for people."""
        parts = [self.q_dtype]
        if self.head_dim:
            dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
            parts = [f"head dim {dims}", *parts, f"{self.kv_dtype} KV", f"page size {self.page_size}"]
        elif self.kv_dtype.startswith(("fp8", "fp4")):
            parts.append(f"{self.kv_dtype} KV")
        if any(self.heads):
            parts.append("{} / {} heads".format(*self.heads))
        if self.ranks > 1:
            parts.append(f"{self.ranks} ranks")
        if self.rotary_dim:
            parts.append(f"{self.rotary_dim} dims rotate")
        if self.quant:
            parts.append(self.quant)
        return ", ".join([*parts, *sorted(self.traits)])


Refuse = Callable[[Need, ArchTraits], list[str]]
"""Reasons why a kernel cannot serve a need on an architecture; empty when it can."""


def no_refusal(need: Need, arch: ArchTraits) -> list[str]:
    """Returns no reasons: the default refusal."""
    return []


Remark = Callable[[Need, ArchTraits], str]
"""A remark for the user about how a kernel serves a need there; empty when there is nothing unusual."""


def no_remark(need: Need, arch: ArchTraits) -> str:
    """Returns "": the default remark."""
    return ""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One candidate of an op's table."""

    name: str
    entry: str = ""  # "package.module:attribute", imported when the model is built
    requires: frozenset[str] = frozenset()  # features of ArchTraits
    package: str | None = None  # optional distribution that must be installed
    takes_plan: bool = False  # `entry` is a class that is created with the plan; its instance is the kernel
    tiled: bool = False  # takes a tile; one must be in the ledger and fit
    configs: str = (
        ""  # "package.module:function" (Need, ArchTraits) -> OpTileConfigs, for kernels whose tiles depend on tokens
    )
    alternatives: str = ""  # "package.module:function" (Need, ArchTraits, shape, tokens) -> the tile configs that are
    # possible for a step of so many tokens, from which measured times choose
    kernel_module: str = ""  # module of a tiled kernel's code, if it is not the entry's
    refuse: Refuse = no_refusal
    graph_safe: bool = True  # may run inside a CUDA graph
    graph_prefill: bool = False  # attention: prefill graphs may contain it, because it needs only shapes from the host
    not_here: str | None = None  # why a kernel of other servers is not part of this one
    asked_as: str = ""  # its other name in flags; of several kernels with one name the first that can serves
    remark: Remark = no_remark

    def why_not(self, need: Need, arch: ArchTraits, packages: frozenset[str]) -> list[str]:
        """Returns every reason against this kernel, the hardware's first; empty if there is none. Tiles are checked
        afterwards."""
        missing = sorted(self.requires - arch.features)
        reasons = [f"needs {', '.join(missing)}, which {arch.name} does not have"] if missing else []
        reasons += self.refuse(need, arch)
        if self.not_here is not None:
            reasons.append(self.not_here)
        elif self.package is not None and self.package not in packages:
            reasons.append(f"{self.package} is not installed")
        return reasons


@dataclass(frozen=True, slots=True)
class Rejection:
    """A kernel that was not chosen, with the reasons."""

    kernel: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class TileRecord:
    """The ledger's facts about a tile on one architecture, in bytes: the worst case over the kernel's variants."""

    smem: int
    registers: int
    spills: int
    stack: int
    mma: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that serves a need, the tile that it gets, and everything that was not chosen."""

    need: Need
    spec: KernelSpec
    tile: Tile | None = None
    record: TileRecord | None = None
    smaller_tiles: tuple[Tile, ...] = ()  # fallbacks of a launch, in order
    rejected: tuple[Rejection, ...] = ()
    note: str | None = None  # why it was chosen, if not by the table's order
    remark: str = ""  # how it serves, if that is unusual

    @property
    def name(self) -> str:
        """Returns the name of the chosen kernel."""
        return self.spec.name

    def load(self) -> Any:
        """Returns the kernel's callable (or backend class). Imports its module."""
        return _imported(self.spec.entry)

    def make_tile_configs(self, arch: ArchTraits) -> Any:
        """Returns the OpTileConfigs of a kernel whose tiles depend on the number of tokens. Imports a module of data
        only, without torch."""
        return _imported(self.spec.configs)(self.need, arch)

    def make_alternatives(self, arch: ArchTraits, shape: Any, tokens: int) -> Any:
        """Returns the tile configs that are possible for a step of `tokens` tokens. shape: of the weight, for linear
        layers. Imports as `make_tile_configs`."""
        return _imported(self.spec.alternatives)(self.need, arch, shape, tokens)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class NoKernel(UserError):
    """Raised where no candidate serves a need: a start-up error that says why each cannot, and what would work."""

    def __init__(
        self,
        need: Need,
        arch: ArchTraits,
        rejected: tuple[Rejection, ...],
        forced: str | None = None,
        would_work: tuple[str, ...] = (),
    ) -> None:
        self.need, self.arch, self.rejected, self.forced, self.would_work = need, arch, rejected, forced, would_work
        what = f"{need.op} ({need.describe()}) on {arch.name}"
        head = f"{forced} cannot run {what}" if forced else f"no kernel can run {what}"
        lines = [head + ":", *(f"  - {rejection}" for rejection in rejected)]
        if would_work:
            lines.append(f"What would work: {', '.join(would_work)}.")
        super().__init__("\n".join(lines))
