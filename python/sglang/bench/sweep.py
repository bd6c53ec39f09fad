"""`sglang bench sweep`: measures every concurrency with every pair of lengths on every server, repeatedly, one JSON
line each.

A sweep that is restarted with the same results file measures only what is missing. Prompts are random tokens of exact
lengths, different in every repetition; each point begins with a warm-up and an empty prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from tqdm import tqdm

from sglang.bench.http_client import HttpError
from sglang.bench_serving import BenchError, build_parser, run_benchmark
from sglang.doctor.reading import Sources, read_smi
from sglang.srt.errors import UserError
from sglang.version import __version__

FORMAT = 1
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
FACTS = (
    "version",
    "model_path",
    "tp_size",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_total_num_tokens",
    "product",
)
"""The facts that are taken from /server_info, wherever they stand in it; another server than ours may have none of
them."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a sweep."""

    server: str
    url: str
    input_len: int
    output_len: int
    concurrency: int
    repeat: int

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """Returns the part of a point that identifies it in a results file; the server's URL is not in it, as it may
        move."""
        return self.server, self.input_len, self.output_len, self.concurrency, self.repeat

    def __str__(self) -> str:
        return f"{self.server} {self.input_len}:{self.output_len} x {self.concurrency} #{self.repeat + 1}"


def read_results(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a results file, without a last line that was cut off. Raises UserError for a file of another
    form."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            if row["format"] != FORMAT:
                raise ValueError(f"format {row['format']}, this version reads {FORMAT}")
            point_of(row)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is no result of `sglang bench sweep`: {error!r}") from None
        rows.append(row)
    return rows


def point_of(row: dict[str, Any]) -> Point:
    """Returns the point that a row of a results file measured."""
    return Point(**row["point"])


def points(args: argparse.Namespace) -> list[Point]:
    """Returns all points, repetitions last, so that an interrupted sweep has every point at least once."""
    return [
        Point(name, url, input_len, output_len, concurrency, repeat)
        for repeat in range(args.repeats)
        for name, url in args.server
        for input_len, output_len in args.lengths
        for concurrency in args.concurrency
    ]


def point_command(point: Point, args: argparse.Namespace) -> list[str]:
    """Returns the arguments of `sglang bench serving` that measure a point."""
    flags = {
        "--backend": args.backend,
        "--base-url": point.url,
        "--dataset-name": "random-ids",
        "--random-input-len": point.input_len,
        "--random-output-len": point.output_len,
        "--random-range-ratio": 1.0,
        "--num-prompts": max(args.requests, args.requests_per_slot * point.concurrency),
        "--max-concurrency": point.concurrency,
        "--warmup-requests": point.concurrency,
        "--seed": 1 + point.repeat,
    }
    words = [word for name, value in flags.items() for word in (name, str(value))]
    words += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    return [*words, *(["--flush-cache"] if args.flush_cache else [])]


def measure(point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Returns a row of the results file. Raises BenchError, HttpError, UserError or ValueError."""
    words = point_command(point, args)
    parsed = build_parser().parse_args([*words, "--disable-tqdm"])
    with contextlib.redirect_stdout(io.StringIO()):
        record = run_benchmark(parsed)
    if record["failed"]:
        raise BenchError(f"{record['failed']} requests failed: {next(filter(None, record['errors']))}")
    return {
        "format": FORMAT,
        "point": {name: getattr(point, name) for name in Point.__slots__},
        "command": shlex.join(["sglang", "bench", "serving", *words]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "client": f"sm120-sglang {__version__}",
        "facts": server_facts(point.url) | (machine_facts() if is_here(point.url) else {}),
        "numbers": {name: value for name, value in record.items() if name not in DETAILS},
    }


def server_facts(url: str) -> dict[str, Any]:
    """Returns the server's facts; empty if it has no /server_info."""
    try:
        with urlopen(f"{url.rstrip('/')}/server_info", timeout=10) as response:
            info = json.load(response)
    except (URLError, ValueError, OSError):
        return {}
    flat = dict(_flat(info)) if isinstance(info, dict) else {}
    return {name: flat[name] for name in FACTS if flat.get(name) is not None}


def is_here(url: str) -> bool:
    """Returns whether a server runs on this machine, as far as its URL says."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


@cache
def machine_facts() -> dict[str, str]:
    """Returns facts of this machine: GPUs, driver, CPU, operating system."""
    gpus, driver, _ = read_smi(Sources())
    kinds = Counter(f"{gpu.name}, {gpu.memory or 0:,.0f} MiB" for gpu in gpus)
    facts = {"gpus": "; ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"}
    facts |= {"driver": driver} if driver else {}
    cpu = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return facts | {"cpu": f"{os.cpu_count()} x {cpu[1] if cpu else platform.machine()}", "system": platform.platform()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flattens nested values; among equal names the outermost comes last."""
    for value in values.values():
        if isinstance(value, dict):
            yield from _flat(value)
    yield from ((name, value) for name, value in values.items() if not isinstance(value, dict | list))


def _server(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name or "://" not in url:
        raise argparse.ArgumentTypeError(f"expected NAME=URL, such as ours=http://127.0.0.1:30000; got {text!r}")
    return name, url


def _numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers such as 1,8,64; got {text!r}")
    return values


def _lengths(text: str) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",")]
    try:
        values = [(int(first), int(second)) for first, second in pairs]
    except ValueError:
        values = []
    if not values or min(min(pair) for pair in values) < 1:
        raise argparse.ArgumentTypeError(f"expected INPUT:OUTPUT tokens such as 1024:128,4096:512; got {text!r}")
    return values


def sweep_parser() -> argparse.ArgumentParser:
    """Returns the parser of `sglang bench sweep`."""
    parser = argparse.ArgumentParser(
        prog="sglang bench sweep",
        description="Measure servers at every concurrency with every pair of lengths. Points of the results file are"
        " not measured again.",
    )
    parser.add_argument("--server", type=_server, action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--results", type=Path, required=True, help="a line of JSON is added for each point")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 4, 16, 64], help="default: 1,4,16,64")
    parser.add_argument(
        "--lengths", type=_lengths, default=[(1024, 128)], help="INPUT:OUTPUT tokens; default: 1024:128"
    )
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--requests", type=int, default=16, help="least requests of a point; default: 16")
    parser.add_argument("--requests-per-slot", type=int, default=4, help="least for each concurrent one; default: 4")
    parser.add_argument("--backend", default="sglang", help="see `sglang bench serving`; default: sglang")
    parser.add_argument("--tokenizer", help="directory or Hugging Face id; default: the server's")
    parser.add_argument("--no-flush", dest="flush_cache", action="store_false", help="for servers without /flush_cache")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the points that the results file lacks and returns the exit status."""
    args = sweep_parser().parse_args(argv)
    try:
        known = {point_of(row).key for row in read_results(args.results)} if args.results.exists() else set()
        _drop_cut_line(args.results)
        todo = [point for point in points(args) if point.key not in known]
        with args.results.open("a", encoding="utf-8") as file, tqdm(total=len(todo), file=sys.stderr) as bar:
            for point in todo:
                bar.set_description(str(point))
                file.write(json.dumps(measure(point, args)) + "\n")
                file.flush()
                bar.update()
    except (BenchError, HttpError, UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(todo)} points measured, {len(known)} were there: {args.results}")
    return 0


def _drop_cut_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


if __name__ == "__main__":
    sys.exit(main())
