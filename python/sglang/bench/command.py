"""`sglang bench`: the benchmarks by one name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

USAGE = """\
usage: sglang bench COMMAND [options]

  serving    throughput and latencies of a running server (python -m sglang.bench_serving)
  one-batch  latency of one batch, without a server (python -m sglang.bench_one_batch)
  offline    throughput of the engine in-process (python -m sglang.bench_offline_throughput)
  sweep      concurrencies x lengths x servers, into a file that an interrupted sweep goes on from
  card       times of this server's kernels on this card, beside predictions (python -m sglang.bench.card)
  report     charts of such files, in one HTML page and as a PDF

`sglang bench COMMAND --help` explains a command.
"""


def _serving(argv: Sequence[str]) -> int:
    from sglang.bench_serving import main

    return main(argv)


def _one_batch(argv: Sequence[str]) -> int:
    from sglang.bench_one_batch import main

    return main(argv)


def _offline(argv: Sequence[str]) -> int:
    from sglang.bench_offline_throughput import main

    return main(argv)


def _sweep(argv: Sequence[str]) -> int:
    from sglang.bench.sweep import main

    return main(argv)


def _report(argv: Sequence[str]) -> int:
    from sglang.bench.report import main

    return main(argv)


def _card(argv: Sequence[str]) -> int:
    from sglang.bench.card import main

    return main(argv)


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serving": _serving,
    "one-batch": _one_batch,
    "offline": _offline,
    "sweep": _sweep,
    "card": _card,
    "report": _report,
}


def run_bench(argv: Sequence[str]) -> int:
    """Runs a benchmark. Returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"error: unknown benchmark {argv[0]!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])
