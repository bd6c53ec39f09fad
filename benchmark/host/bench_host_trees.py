#!/usr/bin/env python3
"""What a decode step of text costs the scheduler's host side, of several kinds of server and of two trees, in turns.

    python benchmark/host/bench_host_trees.py [--base DIR] [--rounds 20] [--requests 1,256]

Cases: this tree's server of a model that only reads, of one that sees (all requests are text), and with `--base` that
of another checkout, whose `benchmark/host/bench_host.py` has `scheduler_step`. Each round starts one process a case, in
an order that turns, and a process gives the best of some thousand steps. The table has the least of all rounds and,
beside the first case, the median of the rounds' ratios with its quartiles. Function calls of a step do not depend on
what else the machine does: they are counted, not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT, SEEING, BASE = "text alone", "with a tower", "base"
MEASURE = """
import json, sys
folder, seeing, *counts = sys.argv[1:]
sys.path.insert(0, folder)
import bench_host
steps = []
bench_host.best_of = lambda step, repeats: steps.append(step) or 0.0
def calls_of(step):
    total = 0
    def counted(frame, event, argument):
        nonlocal total
        total += event in ("call", "c_call")
    sys.setprofile(counted)
    for _ in range(16):
        step()
    sys.setprofile(None)
    return total / 16
import time
def best(step, repeats):
    least = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        least = min(least, time.perf_counter() - begin)
    return least
rows = {}
for count in counts:
    media = (bench_host.features(),) if seeing == "1" else ()
    bench_host.scheduler_step(int(count), True, *media)
    step = steps.pop()
    rows[count] = [1e6 * best(step, 1500), calls_of(step)]
print(json.dumps(rows))
"""


def measured(tree: Path, seeing: bool, counts: list[str]) -> dict[str, list[float]]:
    """Returns requests -> microseconds and function calls of a step."""
    words = [sys.executable, "-c", MEASURE, str(tree / "benchmark" / "host"), str(int(seeing)), *counts]
    env = os.environ | {"PYTHONPATH": str(tree / "python"), "OMP_NUM_THREADS": "1"}
    rows: dict[str, list[float]] = json.loads(subprocess.check_output(words, env=env).splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", default="1,256")
    args = parser.parse_args()
    cases = {TEXT: (ROOT, False), SEEING: (ROOT, True)} | ({BASE: (args.base, False)} if args.base else {})
    counts, names = args.requests.split(","), list(cases)
    rows: dict[str, list[dict[str, list[float]]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rows[name].append(measured(*cases[name], counts))
    print(f"| requests | server | least, us | beside {TEXT} | quartiles | function calls |\n|---|---|---|---|---|---|")
    for count in counts:
        for name in names:
            ratios = [row[count][0] / text[count][0] - 1 for row, text in zip(rows[name], rows[TEXT], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if args.rounds > 1 else ratios * 3
            least, calls = min(row[count][0] for row in rows[name]), min(row[count][1] for row in rows[name])
            beside = f"{middle:+.1%} | {low:+.1%} to {high:+.1%}" if name != TEXT else "|"
            print(f"| {count} | {name} | {least:.1f} | {beside} | {calls:.0f} |")


if __name__ == "__main__":
    main()
