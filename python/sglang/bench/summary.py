"""Summary numbers of a serving run, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.bench.backends import RequestResult


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of durations in milliseconds; all zero if nothing was measured."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        """Returns statistics in milliseconds of durations in seconds; zeros if there are none."""
        ms = np.asarray(seconds if len(seconds) else [0.0], np.float64) * 1e3
        p50, p90, p95, p99 = np.percentile(ms, [50, 90, 95, 99]).tolist()
        return Spread(float(ms.mean()), p50, float(ms.std()), p90, p95, p99, float(ms.max()))

    def as_dict(self, name: str) -> dict[str, float]:
        """Returns the statistics with upstream's names, such as "p99_ttft_ms"."""
        values = {"mean": self.mean, "median": self.median, "std": self.std, "p90": self.p90, "p95": self.p95}
        values |= {"p99": self.p99, "max": self.max}
        return {f"{stat}_{name}_ms": value for stat, value in values.items()}


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of a whole run. Throughputs count successful requests, per second of `duration`."""

    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    concurrency: float
    """Requests in flight, on average."""
    e2e: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    accept_length: float | None = None
    """Tokens that a request got from a step that verified draft tokens; None: there were none, or nobody says."""

    @staticmethod
    def of(results: Sequence[RequestResult], duration: float) -> Summary:
        """Returns the summary of all requests of a run. duration: seconds."""
        good = [r for r in results if r.success]
        return Summary(
            completed=len(good),
            failed=len(results) - len(good),
            duration=duration,
            total_input_tokens=sum(r.prompt_len for r in good),
            total_output_tokens=sum(r.output_len for r in good),
            total_cached_tokens=sum(r.cached_tokens for r in good),
            concurrency=sum(r.latency for r in good) / duration,
            e2e=Spread.of([r.latency for r in good]),
            ttft=Spread.of([r.ttft for r in good]),
            tpot=Spread.of([r.tpot for r in good if r.tpot is not None]),
            itl=Spread.of([gap for r in good for gap in r.itl]),
        )

    @property
    def request_throughput(self) -> float:
        """Returns requests a second."""
        return self.completed / self.duration

    @property
    def input_throughput(self) -> float:
        """Returns prompt tokens a second."""
        return self.total_input_tokens / self.duration

    @property
    def output_throughput(self) -> float:
        """Returns generated tokens a second."""
        return self.total_output_tokens / self.duration

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers with upstream's names."""
        return {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "total_cached_tokens": self.total_cached_tokens,
            "request_throughput": self.request_throughput,
            "input_throughput": self.input_throughput,
            "output_throughput": self.output_throughput,
            "total_throughput": self.input_throughput + self.output_throughput,
            **self.e2e.as_dict("e2e_latency"),
            **self.ttft.as_dict("ttft"),
            **self.tpot.as_dict("tpot"),
            **self.itl.as_dict("itl"),
            "concurrency": self.concurrency,
            **({} if self.accept_length is None else {"accept_length": self.accept_length}),
        }


WIDTH = 50


def row(name: str, value: object) -> str:
    """Returns one line of a result table; floats with two digits."""
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value!s:<10}"


def heading(title: str, fill: str = "-") -> str:
    """Returns the title in the middle of a line of `fill`."""
    return f"{title:{fill}^{WIDTH}}"


def _spread_rows(name: str, spread: Spread, stats: Sequence[str]) -> list[str]:
    values = {"Mean": spread.mean, "Median": spread.median, "P90": spread.p90, "P95": spread.p95, "P99": spread.p99}
    values["Max"] = spread.max
    return [row(f"{stat} {name} (ms):", values[stat]) for stat in stats]


def report(summary: Summary, backend: str, request_rate: float, max_concurrency: int | None) -> str:
    """Returns the table that `bench_serving` prints."""
    usual = ("Mean", "Median", "P99")
    lines = [
        heading(" Serving Benchmark Result ", "="),
        row("Backend:", backend),
        row("Traffic request rate:", request_rate),
        row("Max request concurrency:", max_concurrency if max_concurrency is not None else "not set"),
        row("Successful requests:", summary.completed),
        *([row("Failed requests:", summary.failed)] if summary.failed else []),
        row("Benchmark duration (s):", summary.duration),
        row("Total input tokens:", summary.total_input_tokens),
        *([row("Total cached tokens:", summary.total_cached_tokens)] if summary.total_cached_tokens else []),
        row("Total generated tokens:", summary.total_output_tokens),
        row("Request throughput (req/s):", summary.request_throughput),
        row("Input token throughput (tok/s):", summary.input_throughput),
        row("Output token throughput (tok/s):", summary.output_throughput),
        row("Total token throughput (tok/s):", summary.input_throughput + summary.output_throughput),
        row("Concurrency:", summary.concurrency),
        *([] if summary.accept_length is None else [row("Accept length:", summary.accept_length)]),
        heading("End-to-End Latency"),
        *_spread_rows("E2E Latency", summary.e2e, ("Mean", "Median", "P90", "P99")),
        heading("Time to First Token"),
        *_spread_rows("TTFT", summary.ttft, usual),
        heading("Time per Output Token (excl. 1st token)"),
        *_spread_rows("TPOT", summary.tpot, usual),
        heading("Inter-Token Latency"),
        *_spread_rows("ITL", summary.itl, ("Mean", "Median", "P95", "P99", "Max")),
        "=" * WIDTH,
    ]
    return "\n".join(lines)
