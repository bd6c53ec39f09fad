"""The types of needs (of a call site), kernels (their offers) and choices. No torch, no device."""

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
    """The links between a group's GPUs, as probed. `problem`: why no rank may write into another's memory, or none.
    `fusion_problem`: why FlashInfer's kernels, if they were asked for, cannot."""

    topology: Topology
    problem: str = ""
    fusion_problem: str = ""
    library: Topology | None = None
    """The way of NCCL's sums, which are the large ones, where it is another than the links'."""

    @property
    def library_topology(self) -> Topology:
        return self.topology if self.library is None else self.library


@dataclass(frozen=True, slots=True)
class Need:
    """The request of a call site. Head dims 0 where the op has none; dtypes as in ModelConfig, KV dtype of the cache.

    `traits` are properties that not every kernel supports: "sliding_window", "sinks", "logit_cap", "custom_mask",
    "mla", "shared_kv", "sparse", "hybrid_gdn", "hybrid_mamba2", "bidirectional", "head_norm",
    "window_slack" (a window's cache keeps more than the window), "chunked" (windows are chunks), "relative_bias"
    (scores get one by their distance), "expert_bias",
    "clamped_gate", "gelu_gate", "flashinfer_fusion" (asked for), "token_shares" (ranks share out the
    tokens, and merge what they make of theirs), "uneven_sizes" (some are no powers of two, of ops that say so).
    `heads`: (query, kv) heads of a rank;
    `rotary_dim`: dims of a head that rotate; `shapes`: (rows, cols, whether there is a bias) of a rank's weights: of
    linear layers, and of the first and the second product of experts. `variant` tells two needs of one op apart.
    `experts`: that a rank has room for, that a token goes to, and groups of ranks that have some of their own.
    `ranks` and `links`: of an all-reduce, how many take part and what joins their GPUs (None: nobody has looked).
    `library_problem`: the defect that a check of this GPU found in the library's kernel of the op.
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
        """Names the need among those of a model: linear layers have one for each scheme of their weights, and an op has
        several where layers differ in shape."""
        parts = (self.op, self.quant if self.op == "linear" else None, self.variant)
        return "/".join(part for part in parts if part)

    def describe(self) -> str:
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


def refuses_nothing(need: Need, arch: ArchTraits) -> list[str]:
    return []


Remark = Callable[[Need, ArchTraits], str]
"""A remark for the user about how a kernel serves a need there; empty when there is nothing unusual."""


def nothing_unusual(need: Need, arch: ArchTraits) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One candidate of an op's table."""

    name: str
    entry: str = ""  # "package.module:attribute", imported when the model is built
    requires: frozenset[str] = frozenset()  # features of ArchTraits
    package: str | None = None  # optional distribution that must be installed
    tiled: bool = False  # takes a tile; one must be in the ledger and fit
    configs: str = (
        ""  # "package.module:function" (Need, ArchTraits, bool) -> OpTileConfigs, of one that has tiles by tokens
    )
    kernel_module: str = ""  # of a tiled kernel: where its code is, if not at the entry
    refuse: Refuse = refuses_nothing
    graph_safe: bool = True  # may run inside a CUDA graph
    graph_prefill: bool = False  # attention: prefill too, because it takes nothing but shapes from the host
    not_here: str | None = None  # exists elsewhere; why it is not part of this server
    asked_as: str = ""  # another name of it in flags; of several kernels with one name the one that can serves
    remark: Remark = nothing_unusual

    def why_not(self, need: Need, arch: ArchTraits, packages: frozenset[str]) -> list[str]:
        """Every reason against this kernel, the hardware's first. Tiles are looked at afterwards."""
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
    kernel: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class TileRecord:
    """The ledger's facts about a tile on one architecture: worst case over the kernel's variants. Bytes."""

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
    smaller_tiles: tuple[Tile, ...] = ()  # what a launch may step down to, in order
    rejected: tuple[Rejection, ...] = ()
    note: str | None = None  # why it was chosen, where that is not the table
    remark: str = ""  # how, where that is unusual

    @property
    def name(self) -> str:
        return self.spec.name

    def load(self) -> Any:
        """The kernel's callable (or backend class). Imports its module."""
        return _imported(self.spec.entry)

    def make_tile_configs(self, arch: ArchTraits) -> Any:
        """The OpTileConfigs of a kernel that has tiles by tokens. Imports a module of data: no torch."""
        return _imported(self.spec.configs)(self.need, arch)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class NoKernel(UserError):
    """No candidate serves the need: a start-up error that says why, for each, and what would work."""

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
