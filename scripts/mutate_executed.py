"""Puts faults into the PTX of kernels and counts those that an execution notices. No GPU.

    python scripts/mutate_executed.py                 # every group of kernels; writes executed_faults.json
    python scripts/mutate_executed.py norms sampling  # some groups

Runs a group's tests over executed PTX and keeps some launches of each form. Then it executes faulty texts on them. A
fault is noticed if the execution of one stops, or if a result differs by more than tests allow. It does not count if an
execution proves that it cannot show on any of the launches: its line does in every thread what the right one does, or
no result depends on what the line computes where the two differ (`ptx/effect.py`). Prints those that are not noticed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["SGLANG_EXECUTE_PTX"] = "sm_120"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test"), str(ROOT / "scripts")]

import first_cases  # noqa: E402
import pytest  # noqa: E402

from sglang.ledger.ptx import driver  # noqa: E402
from sglang.ledger.ptx.effect import DEAD, NO_EFFECT  # noqa: E402
from sglang.ledger.ptx.launch import Executed, launch  # noqa: E402
from sglang.ledger.ptx.mutate import Mutation, mutations  # noqa: E402
from sglang.ledger.ptx.problems import Unsupported  # noqa: E402
from sglang.ledger.ptx.record import FAULTS  # noqa: E402
from sglang.ledger.ptx.trial import Trial, copies  # noqa: E402

LAYERS = "test/srt/layers"
GROUPS = {  # files of tests, and which of them as pytest's -k has it
    "norms": (f"{LAYERS}/test_triton_ops.py", ""),
    "products": (f"{LAYERS}/test_gemv.py", ""),
    "quantized products": (f"{LAYERS}/quantization/test_quant_linear.py", ""),
    "block-scaled products": (f"{LAYERS}/quantization/test_quant_linear.py", "native"),
    "quantizing": (f"{LAYERS}/quantization/test_quantize_kernels.py", ""),
    "experts": (f"{LAYERS}/moe/test_fused_moe.py", ""),
    "routing": (f"{LAYERS}/moe/test_topk.py", ""),
    "attention of decoding": (f"{LAYERS}/attention/test_attention_kernels.py", "decode"),
    "attention over prefixes": (f"{LAYERS}/attention/test_attention_kernels.py", "extend"),
    "latent attention": (f"{LAYERS}/attention/test_latent_attention.py", ""),
    "recurrent states": (f"{LAYERS}/recurrent/test_channel_kernels.py", ""),
    "convolutions": (f"{LAYERS}/recurrent/test_conv_and_norm_kernels.py", ""),
}
EQUIVALENT = (NO_EFFECT, DEAD)
SECONDS = 60
"""No test begins after them; one's first case is the first of its function."""
LAUNCHES = 10
"""Kept of a form: those that execute the most."""
MOST_WORK = 3_000_000
"""Instructions of threads, of a launch that is kept."""


@dataclass
class Kept:
    """A launch before a trial of it."""

    ptx: str
    given: tuple[Any, ...]
    done: Executed

    @property
    def work(self) -> int:
        return sum(self.done.instructions.values())

    @functools.cached_property
    def trial(self) -> Trial | None:
        try:
            return Trial(self.ptx, *self.given)
        except Unsupported:  # its addresses are in a table
            return None


def keep(file: str, chosen: str) -> dict[str, list[Kept]]:
    """Runs the tests and returns some launches of each form, by its text."""
    kept: dict[str, list[Kept]] = {}

    def keeping(ptx: str, grid: tuple[int, int, int], arguments: dict[str, Any], shared: int, threads: int) -> Any:
        before = copies(arguments)
        done = launch(ptx, grid, arguments, shared, threads)
        one = Kept(ptx, (grid, before, shared, threads), done)
        if one.work <= MOST_WORK:
            kept[ptx] = sorted([*kept.get(ptx, []), one], key=lambda each: -each.work)[:LAUNCHES]
        return done

    driver.launch = keeping  # type: ignore[assignment]
    os.environ[first_cases.SECONDS] = str(SECONDS)
    words = ["-n0", "-q", "-p", "no:randomly", "-p", "first_cases", "-m", "not thorough", file, "-k", chosen]
    status = pytest.main(words)
    if status not in (0, pytest.ExitCode.INTERRUPTED):
        raise SystemExit("the tests fail without a fault")
    return kept


def outcome(launches: Sequence[Kept], fault: Mutation) -> str:
    """Returns how the fault shows on the first launch where it does; "" if it has an effect and does not."""
    found = NO_EFFECT
    for one in launches:
        if fault.line not in one.done.lines or one.trial is None:
            continue
        shown = one.trial.outcome(fault)
        if shown not in ("", *EQUIVALENT):
            return shown
        found = min(found, shown, key=("", DEAD, NO_EFFECT).index)
    return found


def group(name: str, count: int) -> dict[str, dict[str, int]]:
    """Returns kind of fault -> how many were tried, had an effect, were noticed; `count` of those with an effect."""
    kept = keep(*GROUPS[name])
    every: dict[str, list[tuple[str, Mutation]]] = {}
    for ptx, launches in kept.items():
        lines = {line for one in launches for line in one.done.lines}
        for fault in (fault for fault in mutations(ptx) if fault.line in lines):
            every.setdefault(fault.kind, []).append((ptx, fault))
    rng = random.Random(0)
    for of_kind in every.values():
        rng.shuffle(of_kind)
    turns = range(max(map(len, every.values()), default=0))  # a fault of each kind in turn
    figures = {kind: {"tried": 0, "counted": 0, "noticed": 0} for kind in every}
    how: Counter[str] = Counter()
    for ptx, fault in (of_kind[i] for i in turns for of_kind in every.values() if i < len(of_kind)):
        if sum(one["counted"] for one in figures.values()) == count:
            break
        shown = outcome(kept[ptx], fault)
        how[shown or "not noticed"] += 1
        figures[fault.kind]["tried"] += 1
        figures[fault.kind]["counted"] += shown not in EQUIVALENT
        figures[fault.kind]["noticed"] += shown not in ("", *EQUIVALENT)
        if not shown:
            entry = next(line for line in ptx.split("\n") if ".entry" in line).split()[-1].rstrip("(")
            print(f"not noticed: {fault.kind}, {entry}, line {fault.line}: {fault.before.strip()}", flush=True)
            if folder := os.environ.get("KEEP_TEXTS"):
                Path(folder, f"{entry}-{fault.line}.ptx").write_text(ptx)
    print(name, dict(how), figures, flush=True)
    return figures


def write(name: str, figures: Mapping[str, Any]) -> None:
    """Puts a group's figures into the record."""
    record = json.loads(FAULTS.read_text()) if FAULTS.exists() else {}
    record[name] = figures
    FAULTS.write_text(json.dumps({name: record[name] for name in GROUPS if name in record}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if fewer than 95% are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of: {', '.join(GROUPS)}")
    parser.add_argument("--count", type=int, default=20, help="faults with an effect, of each group")
    args = parser.parse_args(argv)
    if len(args.groups) == 1:
        figures = group(args.groups[0], args.count)
        write(args.groups[0], figures)
    else:  # each in a process of its own
        for name in args.groups or GROUPS:
            subprocess.run([sys.executable, __file__, "--count", str(args.count), name], check=False)
        record = json.loads(FAULTS.read_text())
        figures = {str(i): one for i, one in enumerate(one for kinds in record.values() for one in kinds.values())}
    counted, noticed = (sum(one[what] for one in figures.values()) for what in ("counted", "noticed"))
    print(f"noticed {noticed} of {counted}")
    return 1 if noticed < 0.95 * counted else 0


if __name__ == "__main__":
    sys.exit(main())
