"""Plans the prefix cache in main memory (--enable-hierarchical-cache). All sizes are bytes of one rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.storage_backend import StorageConfig, read_storage_config
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.cache_spec import Window
from sglang.srt.plan.caches import CacheGroup
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import PoolSizes, cache_cost
from sglang.srt.server_args import ServerArgs

GB, GIB = 1000**3, 1024**3
DEFAULT_RATIO = 2.0
LARGEST_UNASKED = 4.0
"""Largest size of pools without a flag, relative to the GPU's."""
UNASKED_FRACTION = 0.5
"""Largest share of the free main memory of pools without a flag: nobody else can use page-locked memory."""
MIN_UNASKED = 32 * GIB
"""Least free main memory for pools without a flag."""
PAYS = 0.5
"""Largest predicted time to load a prefix, relative to computing it, for pools without a flag."""
PAYING_TOKENS = 4096
"""Tokens of the prefix of this comparison."""
MIN_RATIO = 0.05
"""Smallest size of pools, relative to the GPU's, that is worth the copies."""
SYSTEM_RESERVE = 10 * GIB
"""Main memory that is left to the system, or half of the free memory where that is less."""
STAGING_BYTES = 32 << 20
"""Size of a buffer on the device in which pages are gathered."""
STAGING_BUFFERS = 2
"""Number of these buffers: one is filled while the other is sent."""
BUS_RATE = 40e9
"""Bytes a second from main memory to a GPU: three quarters of what a pinned copy reaches over PCIe 5 with 16 lanes, and
a prediction."""
MEMORY_OVER_BUS = 36.0
"""Ratio of the device's memory bandwidth to the bus's, where the former is unknown."""
STEP_TOKENS = 256
"""Tokens from which on a step is bound by multiplications instead of by reading weights."""
PACED_RATE = 16e9
"""Pace of copies in bytes a second, a third of the bus: where all-reduces are a third of a decode step and take twice
as long beside a copy, steps are predicted to take at most a ninth longer while one runs."""
EXPERTS_FIRST = 1 / 8
"""Pace of copies, as a part of the bus, where experts come over it: a decode step waits for its experts, and takes at
most a seventh longer while a prefix is copied."""
SAVE_BYTES = 256 << 20
"""Most bytes of one copy to main memory, so that loads and the steps' own traffic can go in between."""


COPIED = {
    "write_through": "when computed",
    "write_through_selective": "when a second request uses them",
    "write_back": "when the GPU evicts them",
}
"""Texts that say when prefixes are copied to main memory, by --hicache-write-policy."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of a rank's weights: all of them, and at least those that one token multiplies (`active`)."""

    all: int
    active: int


@dataclass(frozen=True, slots=True)
class HostCachePlan:
    """The pools of cached prefixes in main memory. `sizes`: as those of the device, without requests."""

    sizes: PoolSizes
    token_bytes: int
    window_bytes: int
    state_bytes: int
    write_policy: str
    """A key of COPIED: when prefixes are copied to main memory."""
    save_tokens: int
    """Most tokens of one copy to main memory, in whole pages."""
    storage: StorageConfig | None
    """The storage behind main memory; None: there is none."""
    ranks_share: bool
    """True: every rank has the same, whole caches."""
    processes: int
    """Number of such pools on this machine: one for each rank, or for `sharers` ranks together."""
    sharers: int = 1
    """Number of ranks with equal caches that share one pool."""
    weight_bytes: int = 0
    """Bytes of the rank's weights, all of which a step of many tokens reads."""
    memory_over_bus: float = MEMORY_OVER_BUS
    """Bytes that the device reads from its memory while one byte moves over the bus."""
    paced_rate: float | None = None
    """Most bytes a second of copies while requests decode; None: no limit."""

    @property
    def total_bytes(self) -> int:
        return self.token_bytes + self.window_bytes + self.state_bytes

    def copied_bytes(self, num_tokens: int, with_state: bool) -> float:
        """Returns the bytes that a copy of `num_tokens` tokens moves, on the rank that has most. Windows do not
        count."""
        state = self.state_bytes / max(1, self.sizes.checkpoints) if with_state else 0.0
        return self.token_bytes / self.sizes.tokens * num_tokens + state

    def hidden_bytes(self, num_tokens: int) -> float:
        """Returns the bytes that the bus can move while a prompt of `num_tokens` tokens is computed, at least: it reads
        the weights once, and takes proportionally longer beyond STEP_TOKENS tokens."""
        return self.weight_bytes / self.memory_over_bus * max(1.0, num_tokens / STEP_TOKENS)

    def _said_of_storage(self) -> str:
        if self.storage is None:
            return ""
        taken = f", which takes {self.storage.rank_bytes / GIB:.2f} GiB a rank besides" * bool(self.storage.rank_bytes)
        return f", and kept by the backend {self.storage.backend}{taken}"

    def describe(self) -> dict[str, Any]:
        """Describes the pools for /server_info."""
        pools: dict[str, Any] = {"tokens": self.sizes.tokens}
        if self.sizes.windows:
            pools["window_tokens"] = {str(size.window): size.tokens for size in self.sizes.windows}
        if self.sizes.has_states:
            pools["state_checkpoints"] = self.sizes.checkpoints
        return {
            **pools,
            "bytes": self.total_bytes,
            "bytes_of_machine": self.total_bytes * self.processes,
            **({"ranks_of_a_pool": self.sharers} if self.sharers > 1 else {}),
            "write_policy": self.write_policy,
            **({"storage": self.storage.describe()} if self.storage is not None else {}),
        }

    def __str__(self) -> str:
        """Describes it for people."""
        states = f", {self.sizes.checkpoints:,} states" if self.sizes.has_states else ""
        ranks = f", {self.total_bytes * self.processes / GIB:.2f} GiB of {self.processes} pools" * (self.processes > 1)
        of = "a rank" if self.sharers == 1 else f"that {self.sharers} ranks share"
        return (
            f"{self.sizes.tokens:,} tokens{states} in {self.total_bytes / GIB:.2f} GiB of main memory {of}{ranks};"
            f" copied {COPIED[self.write_policy]}" + self._said_of_storage()
        )


def copy_bytes(args: ServerArgs, arch: ArchTraits) -> int:
    """Returns the bytes of the staging buffers on the device."""
    return STAGING_BUFFERS * STAGING_BYTES if args.enable_hierarchical_cache and not arch.unified_memory else 0


def keeps_unasked(args: ServerArgs, arch: ArchTraits, host_available: int) -> bool:
    """Returns whether prefixes are kept in main memory without a flag: on GPUs with memory of their own, where enough
    main memory is free. `host_available`: as in `plan_host_cache`."""
    not_served = args.disable_radix_cache or args.attn_dp_size > 1
    if args.enable_hierarchical_cache or args.disable_hierarchical_cache or not_served:
        return False
    return arch.device == "cuda" and not arch.unified_memory and host_available >= MIN_UNASKED


def plan_host_cache(
    args: ServerArgs,
    groups: Sequence[CacheGroup],
    device: PoolSizes,
    arch: ArchTraits,
    host_available: int | None,
    processes: int,
    ranks_share: bool = False,
    weights: RankBytes | None = None,
    unasked: bool = False,
    sharers: int = 1,
    experts_rate: float | None = None,
) -> tuple[HostCachePlan | None, list[str]]:
    """Plans the pools in main memory. Returns (plan, notes for the user); the plan is None where nothing is kept there.

        groups: caches of the rank that has most
        host_available: free on the machine after everything else is allocated; None: unknown, nothing is checked
        processes: number of pools on the machine
        ranks_share, sharers: as in HostCachePlan
        weights: of the rank; None: unknown
        unasked: no flag asks for it, so nothing is said where it has no effect
        experts_rate: bytes a second at which experts come over the same bus; None: they lie on the GPU

    Raises UserError for a size that was asked for and does not fit.
    """
    if not args.enable_hierarchical_cache and not unasked:
        return None, []
    if not groups:
        return None, [] if unasked else ["--enable-hierarchical-cache has no effect: the model caches nothing"]
    if arch.unified_memory:
        return None, [
            f"--enable-hierarchical-cache has no effect: the memory of {arch.product or arch.name} is the machine's, so"
            " that a copy in main memory would take from the cache what it gives to it"
        ]
    if device.has_states and not device.checkpoints:
        if unasked:
            return None, []
        return None, ["--enable-hierarchical-cache has no effect: no memory is left for copies of states"]
    notes = []
    host_available = left_by_the_store(_storage(args), host_available, processes * sharers)
    if arch.device == "cpu":
        notes.append("--enable-hierarchical-cache: the cache of a CPU is in main memory already; copies only cost time")
    once = replace(_scaled(args, groups, device, 1.0, processes), **_rates(args, arch, weights, experts_rate))
    if unasked and not _pays(once, weights):
        return None, []
    ratio = _ratio(args, once.total_bytes / sharers, host_available, processes * sharers, unasked)
    if ratio < MIN_RATIO:
        if unasked:
            return None, []
        asked = "" if host_available is None else f" of {host_available / GIB:.2f} GiB"
        return None, [*notes, f"--enable-hierarchical-cache has no effect: too little main memory is free{asked}"]
    rates = _rates(args, arch, weights, experts_rate)
    plan = replace(_scaled(args, groups, device, ratio, processes), **rates)
    if host_available is not None and plan.total_bytes * processes > host_available:
        raise UserError(
            f"the prefix cache in main memory takes {plan.total_bytes / GIB:.2f} GiB for each of {processes} pools, but"
            f" {host_available / GIB:.2f} GiB are free. Use a smaller --hicache-size or --hicache-ratio, or neither:"
            " then it is as large as fits."
        )
    return replace(plan, ranks_share=ranks_share, sharers=sharers), notes


def left_by_the_store(storage: StorageConfig | None, available: int | None, ranks: int) -> int | None:
    """Returns what is free beside the memory that the store's library takes in each of the machine's ranks. Raises
    UserError if that is more than there is."""
    if available is None or storage is None or not storage.rank_bytes:
        return available
    taken = storage.rank_bytes * ranks
    if taken > available:
        raise UserError(
            f"--hicache-storage-backend {storage.backend} takes {storage.rank_bytes / GIB:.2f} GiB in each of {ranks}"
            f" ranks, but {available / GIB:.2f} GiB are free. Use a smaller global_segment_size; 0: other processes"
            " give the memory."
        )
    return available - taken


def _storage(args: ServerArgs) -> StorageConfig | None:
    return read_storage_config(
        args.hicache_storage_backend,
        args.hicache_storage_prefetch_policy,
        args.hicache_storage_backend_extra_config,
    )


def _rates(args: ServerArgs, arch: ArchTraits, weights: RankBytes | None, experts_rate: float | None) -> dict[str, Any]:
    """Returns the fields of the plan about the cost of copies and what they overlap with."""
    limits = [PACED_RATE] if args.tp_size > 1 and "nvlink" not in arch.features else []
    limits += [EXPERTS_FIRST * experts_rate] if experts_rate else []
    return {
        "weight_bytes": 0 if weights is None else weights.all,
        "memory_over_bus": arch.bandwidth / BUS_RATE if arch.bandwidth else MEMORY_OVER_BUS,
        "paced_rate": min(limits, default=None),
    }


def active_share(model: ModelDescription) -> float:
    """Returns the share of the weights that a token multiplies, at least; in MoE models the chosen experts' share."""
    return min(
        (experts.top_k / experts.num_experts for layer in model.layers if (experts := layer.ffn.experts)), default=1.0
    )


def _pays(plan: HostCachePlan, weights: RankBytes | None) -> bool:
    """Returns whether loading a prefix is predicted to take clearly less time than computing it, by a lower bound of
    the latter."""
    if weights is None:
        return True
    computed = replace(plan, weight_bytes=weights.active).hidden_bytes(PAYING_TOKENS)
    return plan.copied_bytes(PAYING_TOKENS, plan.sizes.has_states) < PAYS * computed


def _ratio(args: ServerArgs, bytes_at_one: float, available: int | None, processes: int, unasked: bool) -> float:
    """Returns the size of the pools relative to the device's. `bytes_at_one`: what each rank gives to a pool as large
    as the device's."""
    if args.hicache_size:
        return args.hicache_size * GB / max(1, bytes_at_one)
    if args.hicache_ratio is not None:
        return args.hicache_ratio
    if available is None:
        return DEFAULT_RATIO
    fraction = min(args.hicache_host_memory_fraction, UNASKED_FRACTION if unasked else 1.0)
    usable = fraction * max(available - SYSTEM_RESERVE, available // 2)
    return min(LARGEST_UNASKED if unasked else DEFAULT_RATIO, usable / processes / max(1, bytes_at_one))


def _scaled(
    args: ServerArgs, groups: Sequence[CacheGroup], device: PoolSizes, ratio: float, processes: int
) -> HostCachePlan:
    page = device.page_size

    def pages(tokens: int) -> int:
        return max(1, int(tokens * ratio) // page) * page

    windows = tuple(replace(size, tokens=pages(size.tokens)) for size in device.windows)
    checkpoints = max(1, int(device.checkpoints * ratio)) if device.has_states else 0
    sizes = replace(device, tokens=pages(device.tokens), max_requests=0, windows=windows, checkpoints=checkpoints)
    cost = cache_cost(groups)
    of_window = {
        size: sum(g.bytes_per_entry for g in groups if g.lifetime == Window(size.window, size.chunked))
        for size in windows
    }
    per_page = max(1, int(cost.bytes_per_token * page))
    return HostCachePlan(
        sizes,
        token_bytes=int(cost.bytes_per_token * sizes.tokens),
        window_bytes=sum(size.tokens * of_window[size] for size in windows),
        state_bytes=cost.state_bytes * checkpoints,
        write_policy=args.hicache_write_policy,
        save_tokens=max(1, SAVE_BYTES // per_page) * page,
        storage=_storage(args),
        ranks_share=False,
        processes=processes,
    )
