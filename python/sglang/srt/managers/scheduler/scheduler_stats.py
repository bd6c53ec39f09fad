"""Log lines and gauges of the scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.managers.scheduler.draft_stats import DraftStats
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.wire.io_struct import HostCacheStats, SchedulerStats, StorageStats
from sglang.srt.mem_cache.host_tier import HostTier
from sglang.srt.mem_cache.storage.tier import StorageTier
from sglang.srt.model_executor.step import PromptLaunches

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Present load of a scheduler."""

    num_running: int
    num_waiting: int
    used_tokens: int
    pool_tokens: int

    @property
    def token_usage(self) -> float:
        """Returns the share of the pool's slots that running requests use."""
        return self.used_tokens / self.pool_tokens


class StatsLogger:
    """Counts the scheduler's work; `due()` returns a snapshot about once a second while there is work."""

    def __init__(
        self,
        decode_log_interval: int,
        load: Callable[[], Load],
        drafter: str | None = None,
        host_tiers: Sequence[HostTier] = (),
        launches: PromptLaunches | None = None,
    ) -> None:
        """drafter: --speculative-algorithm. host_tiers: those of the schedulers counted here. launches: the runner's
        counts; None: not counted."""
        self.launches = PromptLaunches() if launches is None else launches
        self._host_tiers = host_tiers
        self._decode_log_interval = decode_log_interval
        self._load = load
        self.decode_steps = 0
        self.num_retracted = 0
        self.num_generated = 0
        """Tokens since the start: who reads it twice has the throughput between."""
        self.gen_throughput = 0.0
        self.drafts = DraftStats(drafter)
        self._tokens = 0
        self._tokens_since = time.perf_counter()
        self._cached = self._prompt = 0
        self._last_snapshot = 0.0

    def prefill_launched(self, chosen: list[tuple[Req, int]]) -> None:
        """Counts and logs a step with prompts."""
        new = sum(n for _, n in chosen)
        cached = sum(r.hit_len for r, n in chosen if r.kv_len - n == r.hit_len)
        self._cached += cached
        self._prompt += cached + new
        load = self._load()
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            len(chosen), new, cached, load.token_usage, load.num_running, load.num_waiting,
        )  # fmt: skip

    def decode_launched(self, num_reqs: int, in_graph: bool) -> None:
        """Counts a decode step, and logs once an interval."""
        self.decode_steps += 1
        if self.decode_steps % self._decode_log_interval:
            return
        now = time.perf_counter()
        self.gen_throughput = self._tokens / max(now - self._tokens_since, 1e-9)
        self._tokens, self._tokens_since = 0, now
        load = self._load()
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %scuda graph: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            num_reqs, load.used_tokens, load.token_usage, self.drafts.log_text, in_graph, self.gen_throughput,
            load.num_waiting,
        )  # fmt: skip
        self.drafts.close_interval()

    def processed(self, num_tokens: int) -> None:
        """Counts generated tokens."""
        self._tokens += num_tokens
        self.num_generated += num_tokens

    def retracted(self, req: Req) -> None:
        """Counts and logs a request that goes back to the queue."""
        self.num_retracted += 1
        logger.warning(
            "The KV cache is full: request %s goes back to the queue after %d output tokens (nothing is lost). If this "
            "happens often, lower --max-running-requests or raise --schedule-conservativeness.",
            req.rid, req.output_len,
        )  # fmt: skip

    def restart_interval(self) -> None:
        """Restarts the throughput interval, as waiting for work is not part of the throughput."""
        self._tokens, self._tokens_since = 0, time.perf_counter()
        self.gen_throughput = 0.0

    def due(self) -> SchedulerStats | None:
        """Returns a snapshot if the last one is old enough."""
        now = time.perf_counter()
        if now - self._last_snapshot < STATS_INTERVAL_S:
            return None
        self._last_snapshot = now
        return self.snapshot()

    def snapshot(self) -> SchedulerStats:
        """Returns the present statistics."""
        load, drafts = self._load(), self.drafts
        return SchedulerStats(
            num_running_reqs=load.num_running,
            num_queue_reqs=load.num_waiting,
            num_used_tokens=load.used_tokens,
            token_usage=load.token_usage,
            gen_throughput=self.gen_throughput,
            cache_hit_rate=self._cached / self._prompt if self._prompt else 0.0,
            num_retracted_reqs=self.num_retracted,
            spec_accept_length=drafts.recent.accept_length,
            spec_accept_rate=drafts.recent.accept_rate,
            spec_num_steps=max(drafts.width - 1, 0),
            spec_num_draft_tokens=drafts.width,
            spec_verify_calls=drafts.num_steps,
            spec_confidence_cuts=drafts.confidence_cuts,
            prompt_steps=self.launches.prompt_steps,
            prompt_launch_seconds=self.launches.prompt_launch_seconds,
            halved_steps=self.launches.two_batch_steps,
            halved_tokens=self.launches.two_batch_tokens,
            host_cache=_summed([_host_cache(tier) for tier in self._host_tiers]),
        )


def _summed(each: Sequence[HostCacheStats]) -> HostCacheStats | None:
    """Returns the sums over several tiers, all or none of which have a store; None without tiers."""
    if len(each) < 2:
        return each[0] if each else None
    stores = [stats.storage for stats in each if stats.storage is not None]
    numbers = _sums([msgspec.structs.replace(stats, storage=None) for stats in each])
    return HostCacheStats(**numbers, storage=StorageStats(**_sums(stores)) if stores else None)


def _sums(each: Sequence[msgspec.Struct]) -> dict[str, Any]:
    """Returns the sum of each field that is not None."""
    every = [msgspec.structs.asdict(stats) for stats in each]
    return {name: sum(values[name] for values in every) for name, first in every[0].items() if first is not None}


def _host_cache(tier: HostTier) -> HostCacheStats:
    tree, counts, stats = tier.host.tree, tier.counts, HostCacheStats()
    stats.hicache_host_used_tokens = tree.total_size()
    stats.hicache_host_total_tokens = tree.allocator.size
    if tier.host.checkpoints is not None:
        states = tier.host.checkpoints.usage()
        stats.hicache_host_mamba_used_states = states["cached"]
        stats.hicache_host_mamba_total_states = states["total"]
    stats.load_back_tokens, stats.load_back_bytes = counts.loaded_tokens, counts.loaded_bytes
    stats.load_back_seconds = counts.loading_seconds
    stats.load_back_overlapped_bytes = counts.layered_bytes
    stats.load_back_overlapped_seconds = counts.layered_seconds
    stats.hicache_backup_tokens, stats.hicache_backup_bytes = counts.saved_tokens, counts.saved_bytes
    stats.hicache_backup_seconds = counts.saving_seconds
    stats.hicache_dropped_tokens, stats.hicache_failed_copies = counts.dropped_tokens, counts.failed_copies
    stats.storage = None if tier.storage is None else _storage(tier.storage)
    return stats


def _storage(tier: StorageTier) -> StorageStats:
    counts, engine = tier.counts, tier.engine
    return StorageStats(
        prefetched_tokens=counts.read_tokens,
        prefetched_bytes=counts.read_bytes,
        prefetch_seconds=counts.read_seconds,
        storage_prefetch_unfulfilled_tokens=counts.unfulfilled_tokens,
        backuped_tokens=counts.written_tokens,
        backuped_bytes=counts.written_bytes,
        backup_seconds=counts.written_seconds,
        storage_dropped_tokens=counts.dropped_tokens,
        storage_failures=engine.num_failures,
        storage_corrupt_entries=engine.num_corrupt,
    )
