#!/usr/bin/env python3
"""Prefill of FP8 models on one GPU with each lever off and on, beside upstream SGLang, and tuned tiles to take home.

    python benchmark/peers/fp8_prefill.py --model DIR --model DIR --out OUT [--peer-site DIR] [--triton DIR]
        [--parts products,steps,tune,rows] [--limit 900] [--processes 32] [--dry-run]

`--model`: slices with real layer shapes (config.json and a tokenizer; weights are random). Parts, with their seconds on
an H200 beside 16 processors:

    products   60        each linear product by Triton's tiles and by torch's scaled product, from 512 to 16,384 rows
    steps     190 a model  decode at 1, 16 and 64 and prefill of so many prompts of 1,024: as it is, all in one step,
                         linear layers by Triton, experts with the tiles of before, and the peer
    tune      120 a model  the fastest tiles of its experts, and the steps with them
    rows       60        the tuned files in the package, compiled for the record with this Triton and with --triton's

What is left of --limit decides what still starts. OUT has the log of every part, results.json,
tuned/configs/*/*.json and sm90.lock.json with their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from compare import IN_ONE_STEP, PEER_ENV, Side, latency, peer_path, table  # noqa: E402

from sglang.srt.layers.moe.fused_moe_triton.config_files import TilePair  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.tiles import tile  # noqa: E402
from sglang.tuning.tile_files import to_entry  # noqa: E402

SECONDS = {"products": 60, "steps": 190, "tune": 120, "rows": 60}
"""Of a part; steps and tune for each model."""
OURS = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
TOKENS = ("16", "64", "1024", "8192", "16384")
"""That experts are tuned for: decoding, one prompt, a chunk, sixteen prompts."""
BENCHMARKS = ROOT / "benchmark" / "kernels"
PACKAGE = ROOT / "python" / "sglang" / "srt"
TUNER = BENCHMARKS / "fused_moe_triton" / "tuning_fused_moe_triton.py"
_FEW = tile(16, 64, 128, 1, 4, 4), tile(16, 128, 64, 1, 4, 4)
_MANY = tile(128, 64, 128, 8, 8, 4), tile(128, 256, 64, 8, 8, 4)
FORMER_TILES: dict[str, dict[int, TilePair]] = {
    "fp8_channel": {64: TilePair(*_FEW), 1024: TilePair(*_MANY), 16384: TilePair(*_MANY)},
    "fp8_block": {
        64: TilePair(tile(16, 128, 128, 1, 4, 3), tile(16, 128, 128, 1, 4, 4)),
        1024: TilePair(tile(64, 64, 128, 8, 4, 4), tile(64, 128, 128, 8, 4, 4)),
        16384: TilePair(tile(128, 64, 128, 8, 8, 4), tile(128, 128, 128, 8, 8, 4)),
    },
}
"""What the tables gave for the experts of GLM-4.7 and DeepSeek-V3 until 2026-11-22, by number of tokens."""


@dataclass
class Session:
    """The time that is left, and what came out so far."""

    out: Path
    end: float
    dry: bool
    started: float = field(default_factory=time.monotonic)
    failures: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def part(self, name: str, seconds: float, run: Callable[[], object]) -> None:
        """Runs it if there is time for it. A failure is one line, and the rest goes on."""
        if time.monotonic() + seconds > self.end:
            self.failures.append(f"{name}: left out, it takes {seconds:.0f} s")
            return self.say(self.failures[-1])
        self.say(f"{name} (about {seconds:.0f} s)")
        if self.dry:
            return None
        try:
            run()
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[-600:]}")
            self.say(f"FAILED {self.failures[-1]}")

    def command(self, name: str, words: Sequence[str], seconds: float, **env: str) -> str:
        """Its output, which also goes to OUT/name.log."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words], env={**os.environ, "PYTHONPATH": OURS, **env},
            capture_output=True, text=True, timeout=3 * seconds, check=False,
        )  # fmt: skip
        with (self.out / f"{name}.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(done.stderr or done.stdout)
        return done.stdout


def former_file(scheme: str) -> dict[str, Any]:
    """A tuning file with FORMER_TILES."""
    return {"source": "measured", **{str(tokens): to_entry(pair) for tokens, pair in FORMER_TILES[scheme].items()}}


@dataclass
class Steps:
    """The sides of a model, each with its times."""

    session: Session
    results: dict[str, Any]

    def take(self, side: Side, model: str) -> None:
        self.results.setdefault(model, {})[side.name] = {"latency": latency(side, model)}
        (self.session.out / "results.json").write_text(json.dumps(self.results, indent=1))

    def ours(self, name: str, model: str, flags: Sequence[str] = (), **env: str) -> None:
        self.take(Side(name, OURS, env, list(flags), self.session.out), model)

    def all_sides(self, model: str, peer_site: str | None, peer_flags: str) -> None:
        self.ours("ours", model)
        self.ours("in_one_step", model, IN_ONE_STEP)
        self.ours("linear_by_triton", model, ("--fp8-gemm-backend", "triton"))
        former = self.session.out / f"former_{Path(model).name}"
        write_former(self.session, model, former)
        self.ours("former_expert_tiles", model, SGLANG_MOE_CONFIG_DIR=str(former))
        if peer_site:
            flags = ["--sampling-backend", "pytorch", "--attention-backend", "triton", *shlex.split(peer_flags)]
            self.take(Side("peer_triton", peer_path(peer_site), PEER_ENV, flags, self.session.out), model)

    def tuned(self, model: str, processes: int) -> None:
        root = self.session.out / "tuned"
        words = [str(TUNER), "--model", model, "--batch-size", *TOKENS, "--tune", "--processes", str(processes)]
        said = self.session.command("tune", [*words, "--output-dir", str(root / "configs")], SECONDS["tune"])
        print("\n".join(said.splitlines()[-len(TOKENS) - 1 :]), flush=True)
        self.ours("tuned", model, SGLANG_MOE_CONFIG_DIR=str(root))


def write_former(session: Session, model: str, root: Path) -> None:
    """Under the name that the tuner would give the model's file on this GPU."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tuning_fused_moe_triton as tuner;"
        "from pathlib import Path; from sglang.srt.hardware.arch import device_name;"
        "shape = tuner.read_shape(tuner._parser().parse_args(['--model', sys.argv[2]]));"
        "print(shape.scheme, tuner.output_path(shape, Path(sys.argv[3]), '0.0.0', device_name()).name, sep='\\n')"
    )
    said = session.command("former", ["-c", script, str(TUNER.parent), model, str(root)], 20)
    scheme, name = said.strip().splitlines()[-2:]
    (root / "configs").mkdir(parents=True, exist_ok=True)
    (root / "configs" / name).write_text(json.dumps(former_file(scheme), indent=1))


def record_rows(session: Session, triton: str | None, processes: int) -> None:
    """Tuned files into the package, and the rows of their tiles."""
    for path in (session.out / "tuned" / "configs").glob("*/*.json"):
        target = PACKAGE / "layers" / "moe" / "fused_moe_triton" / "configs" / path.parent.name
        target.mkdir(exist_ok=True)
        shutil.copy(path, target)
    words = ["-m", "sglang.ledger", "update", "--lock", "sm90", "--processes", str(processes)]
    print(session.command("rows", [*words, *(["--triton", triton] if triton else [])], SECONDS["rows"]), flush=True)
    shutil.copy(PACKAGE / "kernels" / "sm90.lock.json", session.out)


def products(session: Session) -> None:
    words = [str(BENCHMARKS / "quantization" / "bench_quant_linear.py"), "--schemes", "fp8_channel", "fp8_block"]
    words += ["--only", "whole", "--rows", "512", "1024", "2048", "4096", "16384"]
    print(session.command("products", [*words, "--json", str(session.out / "products.json")], SECONDS["products"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer-site")
    parser.add_argument("--peer-flags", default="--max-total-tokens 90000", help="more flags of the peer, in one word")
    parser.add_argument("--triton", help="directory with another Triton, for the rows")
    parser.add_argument("--parts", default=",".join(SECONDS))
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 8)
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and for how long")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(SECONDS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))} (has {', '.join(SECONDS)})")
    args.out.mkdir(parents=True, exist_ok=True)
    session = Session(args.out.resolve(), time.monotonic() + args.limit, args.dry_run)
    steps = Steps(session, {})
    if "products" in parts:
        session.part("products", SECONDS["products"], lambda: products(session))
    for part, run in (
        ("steps", lambda model: steps.all_sides(model, args.peer_site, args.peer_flags)),
        ("tune", lambda model: steps.tuned(model, args.processes)),
    ):
        for model in args.model if part in parts else ():
            session.part(f"{part} of {Path(model).name}", SECONDS[part], lambda run=run, model=model: run(model))
    if "rows" in parts:
        session.part("rows", SECONDS["rows"], lambda: record_rows(session, args.triton, args.processes))
    print(table({model: sides for model, sides in steps.results.items() if "ours" in sides}))
    print(*session.failures, sep="\n")
    return 1 if session.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
