"""Counters, gauges and latency histograms for `/metrics`, under the names that existing dashboards use.

An observation only increments a list element, since it happens for every token of every stream. Prometheus objects are
made when the page is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sglang.srt.managers.front.request_record import EndedRequest
from sglang.srt.managers.front.sleeper import Sleeper
from sglang.srt.managers.wire.io_struct import HostCacheStats, SchedulerStats, StorageStats
from sglang.srt.utils.engine_state import TAGS

_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank")
_REPLICA_LABEL = "dp_rank"
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 1, 2, 4, 6, 10, 20, 40, 60, 120, 300)
_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_REQUEST_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 10, 20, 40, 80, 150, 300, 600, 1200, 2400)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 90, 120, 180, 300, 600)
_GAUGES = {
    "num_running_reqs": "Requests in the running batch",
    "num_queue_reqs": "Requests that wait",
    "num_used_tokens": "KV cache slots in use",
    "token_usage": "Share of the KV cache in use",
    "gen_throughput": "Generated tokens per second",
    "cache_hit_rate": "Share of prompt tokens found in the prefix cache",
    "num_retracted_reqs": "Requests that were put back into the queue to free memory",
    "spec_accept_length": "Tokens that a request gets from a step that verifies draft tokens",
    "spec_accept_rate": "Share of the draft tokens that were right",
    "spec_num_steps": "Draft tokens of each request in the last step",
    "spec_num_draft_tokens": "Tokens of each request in the last step, draft tokens and the token sampled last",
}

_DRAFT_COUNTERS = {
    "spec_verify_calls": "Steps that verified draft tokens",
    "spec_confidence_cuts": "Steps with fewer draft tokens because a draft's confidence head thought them unlikely",
}
_PROMPT_COUNTERS = {
    "prompt_steps": "Steps with prompts",
    "prompt_launch_seconds": "Time that the host took to launch steps with prompts",
    "halved_steps": "Steps with prompts that ran as two microbatches",
    "halved_tokens": "Tokens of steps that ran as two microbatches",
}
_HOST_GAUGES = {
    "hicache_host_used_tokens": "Tokens of prefixes that are kept in main memory",
    "hicache_host_total_tokens": "Tokens for which main memory has room",
    "hicache_host_mamba_used_states": "States of prefixes that are kept in main memory",
    "hicache_host_mamba_total_states": "States for which main memory has room",
}
_HOST_COUNTERS = {
    "load_back_tokens": "Tokens loaded from main memory",
    "load_back_bytes": "Bytes loaded from main memory, by a rank",
    "load_back_seconds": "Time that loads from main memory took, from their choice on",
    "load_back_overlapped_bytes": "Bytes of these that came layer by layer while the prompt behind them was computed",
    "load_back_overlapped_seconds": "Time that loads layer by layer took, from their choice on",
    "hicache_backup_tokens": "Tokens copied to main memory",
    "hicache_backup_bytes": "Bytes copied to main memory, by a rank",
    "hicache_backup_seconds": "Time that copies to main memory took, from their choice on",
    "hicache_dropped_tokens": "Tokens that were to be copied to main memory and were not",
    "hicache_failed_copies": "Copies to and from main memory that failed",
}
"""Counters by field of `HostCacheStats`, shown by servers that keep prefixes in main memory."""
_STORAGE_COUNTERS = {
    "prefetched_tokens": "Tokens read from the store of cached prefixes",
    "prefetched_bytes": "Bytes read from the store, by a rank",
    "prefetch_seconds": "Time that reads from the store took",
    "storage_prefetch_unfulfilled_tokens": "Tokens that the store had and that were not read, or not in time",
    "backuped_tokens": "Tokens written to the store",
    "backuped_bytes": "Bytes written to the store, by a rank",
    "backup_seconds": "Time that writes to the store took",
    "storage_dropped_tokens": "Tokens that were to be written to the store and were not",
    "storage_failures": "Calls of the store that failed",
    "storage_corrupt_entries": "Entries of the store that were not what they should be",
}
"""Counters by field of `StorageStats`, shown by servers with a store."""


class Histogram:
    """Counts of observations by upper bound; the last bucket is unbounded."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (upper bound, observations up to it) pairs as Prometheus expects them."""
        seen, pairs = 0, []
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            pairs.append((str(bound), float(seen)))
        return pairs


class Metrics(Collector):
    """Numbers of one server. Schedulers' values have one series for each replica, if there are several."""

    def __init__(self, model_name: str, num_replicas: int = 1) -> None:
        self._labels = (model_name, "unified", "0", "0")
        self._several = num_replicas > 1
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.inter_token = Histogram(_TOKEN_S)
        self.request = Histogram(_REQUEST_S)
        self.queue = Histogram(_QUEUE_S)
        self.stats = [SchedulerStats() for _ in range(num_replicas)]
        self.lost: set[int] = set()
        """Replicas that have ended."""
        self.sleeper: Sleeper | None = None
        """Has what is told of sleep; None: this server cannot sleep."""
        self.generation_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = {"device": 0, "host": 0, "storage": 0}
        self._num_requests = 0
        self._num_aborted = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def finished(self, ended: EndedRequest) -> None:
        """Counts a sequence that has ended."""
        self.request.observe(ended.seconds)
        if ended.queue_seconds is not None:
            self.queue.observe(ended.queue_seconds)
        self._num_requests += 1
        self._num_aborted += ended.finish.type == "abort"
        self._prompt_tokens += ended.meta.prompt_tokens
        of_host, of_storage = ended.meta.host_tokens or 0, ended.meta.stored_tokens or 0
        self._cached_tokens["host"] += of_host - of_storage
        self._cached_tokens["storage"] += of_storage
        self._cached_tokens["device"] += ended.meta.cached_tokens - of_host

    def render(self) -> bytes:
        """Returns the page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._host_cache_metrics()
        yield from self._sleep_metrics()

    def _gauges(self) -> Iterable[Metric]:
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"sglang:{name}", text, labels=self._replica_labels)
            self._add_each(family, name)
            yield family
        if self._several:
            up = GaugeMetricFamily("sglang:replica_up", "1: the replica serves", labels=self._replica_labels)
            for index in range(len(self.stats)):
                up.add_metric((*self._labels, str(index)), index not in self.lost)
            yield up

    @property
    def _replica_labels(self) -> tuple[str, ...]:
        return (*_LABELS, _REPLICA_LABEL) if self._several else _LABELS

    def _add_each(self, family: GaugeMetricFamily | CounterMetricFamily, name: str) -> None:
        """Adds a field of the statistics of each serving replica."""
        for index, stats in enumerate(self.stats):
            if index not in self.lost:
                labels = (*self._labels, str(index)) if self._several else self._labels
                family.add_metric(labels, getattr(stats, name))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"sglang:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self) -> Iterable[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of finished requests", self._prompt_tokens),
            ("generation_tokens", "Generated tokens", self.generation_tokens),
            ("num_requests", "Finished requests", self._num_requests),
            ("num_aborted_requests", "Requests that ended by an abort", self._num_aborted),
        ):
            yield self._counter(name, text, value)
        text = "Prompt tokens that came from the prefix cache"
        family = CounterMetricFamily("sglang:cached_tokens", text, labels=(*_LABELS, "cache_source"))
        for source, value in self._cached_tokens.items():
            if source == "device" or value:
                family.add_metric((*self._labels, source), value)
        yield family
        for name, text in (_DRAFT_COUNTERS | _PROMPT_COUNTERS).items():
            family = CounterMetricFamily(f"sglang:{name}", text, labels=self._replica_labels)
            self._add_each(family, name)
            yield family

    def _sleep_metrics(self) -> Iterable[Metric]:
        if self.sleeper is None:
            return
        asleep, totals = self.sleeper.state.asleep, self.sleeper.totals
        family = GaugeMetricFamily("sglang:asleep", "1: this memory is given back", labels=(*_LABELS, "tag"))
        for tag in TAGS:
            family.add_metric((*self._labels, tag), tag in asleep)
        yield family
        for name, text, value in (
            ("sleeps", "Times that memory was given back", totals.sleeps),
            ("sleep_seconds", "Time that this took, with the wait for requests", totals.sleep_seconds),
            ("wakes", "Times that memory was taken again", totals.wakes),
            ("wake_seconds", "Time that this took", totals.wake_seconds),
        ):
            yield self._counter(name, text, value)

    def _host_cache_metrics(self) -> Iterable[Metric]:
        serving = [(i, stats.host_cache) for i, stats in enumerate(self.stats) if i not in self.lost]
        kept = [(i, host) for i, host in serving if host is not None]
        stored = [(i, host.storage) for i, host in kept if host.storage is not None]
        yield from self._families(_HOST_GAUGES, GaugeMetricFamily, kept)
        yield from self._families(_HOST_COUNTERS, CounterMetricFamily, kept)
        yield from self._families(_STORAGE_COUNTERS, CounterMetricFamily, stored)

    def _families(
        self,
        names: Mapping[str, str],
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        stats: Sequence[tuple[int, HostCacheStats | StorageStats]],
    ) -> Iterable[Metric]:
        """Yields a family for each name, with a value for each replica that has such statistics."""
        for name, text in names.items() if stats else ():
            family = kind(f"sglang:{name}", text, labels=self._replica_labels)
            for index, values in stats:
                labels = (*self._labels, str(index)) if self._several else self._labels
                family.add_metric(labels, getattr(values, name))
            yield family

    def _histograms(self) -> Iterable[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token", self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request", self.inter_token),
            ("queue_time_seconds", "From arrival to the first step", self.queue),
            ("e2e_request_latency_seconds", "From arrival to the last token", self.request),
        ):
            family = HistogramMetricFamily(f"sglang:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, histogram.cumulative(), histogram.total)
            yield family
