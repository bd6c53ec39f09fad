#!/usr/bin/env python3
"""Whether text is as fast with eyes as without: the load table of a server of Qwen3-VL-8B with random weights, beside
the same server with `--language-model-only`, or beside that of another tree.

    python lab/media/bench_text.py --logs DIR [--base TREE]

Requests of text alone, 1, 16 and 64 at a time: output tokens a second, the median time to the first token, and the
median and the 99th percentile between tokens. The servers take turns, one standing still while the other is measured
(A B B A A B), so that a GPU that becomes slower counts for both. `--base`: an unpacked tree, whose server with eyes
takes the place of the one without (`git archive REVISION | tar x -C TREE`). Takes about 3 minutes; what does not fit
`--limit-seconds` is left out. `--tiny` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import bench_served
from bench_served import PORTS, Answer, Server, ask, percentiles, text_body
from compare import PORT, Side

EYES, OTHER = "with eyes", "without eyes"
ORDER = (EYES, OTHER, OTHER, EYES, EYES, OTHER)
ROUND_S = 25.0
"""A turn is not begun if less time is left."""


@dataclass(frozen=True, slots=True)
class Load:
    """`requests`: how many are under way at a time -> how many there are. Lengths are in tokens."""

    requests: dict[int, int] = field(default_factory=lambda: {1: 6, 16: 64, 64: 192})
    prompt: int = 512
    output: int = 128


TINY = Load({1: 2, 4: 6}, 16, 8)


@dataclass(frozen=True, slots=True)
class Turn:
    """One server at one number of requests: output tokens a second, and milliseconds."""

    tokens_s: float
    first_ms: float
    between_ms: float
    p99_ms: float


async def turn(port: int, load: Load, at_once: int, seed: int) -> Turn:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> Answer:
        async with places:
            return await ask(port, text_body(load.prompt, seed + number), load.output)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(load.requests[at_once])))
    seconds = time.perf_counter() - began
    between, p99, _ = percentiles([gap for answer in answers for gap in answer.gaps()])
    first_ms = 1e3 * statistics.median(answer.times[0] for answer in answers)
    return Turn(load.output * len(answers) / seconds, first_ms, between, p99)


def sides_of(args: argparse.Namespace) -> list[Side]:
    """The same flags for both, of which the second has no tower or another tree."""
    (ours,) = bench_served.sides_of(args)
    eyes = Side(EYES, ours.env["PYTHONPATH"], {}, ours.flags, args.logs)
    if args.base:
        # What the caller has on the path stays behind the tree's own packages: libraries may be there.
        path = os.pathsep.join([str(args.base / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        other = Side(OTHER, path, {}, eyes.flags, args.logs)
    else:
        other = Side(OTHER, eyes.env["PYTHONPATH"], {}, [*eyes.flags, "--language-model-only"], args.logs)
    return [eyes, other]


def table(turns: dict[str, dict[int, list[Turn]]]) -> list[str]:
    """Medians of the turns of each server, and of the first one over the second."""
    lines = [
        "| at a time | server | tokens/s | first token, ms | between tokens, ms | p99, ms | turns |",
        "|---" * 7 + "|",
    ]
    for at_once in turns[EYES]:
        medians = {}
        for name, of_server in turns.items():
            rows = of_server.get(at_once, [])
            if rows:
                columns = ([getattr(row, key) for row in rows] for key in Turn.__slots__)
                medians[name] = [statistics.median(column) for column in columns]
                values = " | ".join(f"{value:,.2f}" for value in medians[name])
                lines.append(f"| {at_once} | {name} | {values} | {len(rows)} |")
        if len(medians) == 2:
            ratios = " | ".join(f"{one / other:.3f}" for one, other in zip(*medians.values(), strict=True))
            lines.append(f"| {at_once} | ratio | {ratios} | |")
    return lines


def run(args: argparse.Namespace, order: Sequence[str] = ORDER) -> int:
    """Returns 1 if a server did not start."""
    ends, load = time.monotonic() + args.limit_seconds, TINY if args.tiny else Load()
    PORTS.update({EYES: PORT + 10, OTHER: PORT + 11})
    turns: dict[str, dict[int, list[Turn]]] = {EYES: {}, OTHER: {}}
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = bench_served.write_model(Path(folder), args.tiny)
        try:
            for side in sides_of(args):  # one after the other: a server measures its own steps when it starts
                servers[side.name] = Server(side, model)
                if not servers[side.name].comes_up(args.start_seconds, ends):
                    return 1
                for at_once in load.requests:
                    asyncio.run(turn(PORTS[side.name], replace(load, output=8), at_once, 90_000))
            for number, name in enumerate(order):
                if time.monotonic() > ends - ROUND_S:
                    print(f"turns from {number + 1} on are left out: the time is over", flush=True)
                    break
                (other,) = (server for key, server in servers.items() if key != name)
                with other.stopped():
                    for at_once in load.requests:
                        row = asyncio.run(turn(PORTS[name], load, at_once, 1000 * number))
                        turns[name].setdefault(at_once, []).append(row)
                        print(f"turn {number + 1}, {name}, {at_once}: {row.tokens_s:.1f} tokens/s", flush=True)
        finally:
            for server in servers.values():
                server.end()
    print("\n".join(table(turns)), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of all logs")
    parser.add_argument("--base", type=Path, help="another tree, whose server with eyes is the second one")
    parser.add_argument("--flags", default="", help="more flags of both servers, in one argument")
    parser.add_argument("--start-seconds", type=float, default=150, help="in which a server must be up")
    parser.add_argument("--limit-seconds", type=float, default=240, help="of everything")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the script")
    args = parser.parse_args(argv)
    args.peer_site = None
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
