"""Puts faults into the PTX of kernels and counts those that an execution notices. No GPU.

    python scripts/mutate_executed.py --count 200 test/srt/layers/test_gemv.py

Runs tests over executed PTX and keeps the launches of each form's first one. Then it executes each of the chosen
faulty texts with the same arguments. A fault is noticed if the execution stops, or if a result differs from that of the
right text by more than its type's tests allow. It prints those that are not noticed, and a table by kind of fault.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ["SGLANG_EXECUTE_PTX"] = "sm_120"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]

import pytest  # noqa: E402
import torch  # noqa: E402

from sglang.ledger.ptx import driver  # noqa: E402
from sglang.ledger.ptx.launch import launch  # noqa: E402
from sglang.ledger.ptx.mutate import Mutation, mutations  # noqa: E402
from sglang.ledger.ptx.problems import Hazard, Unsupported  # noqa: E402

TOLERANCE = 1e-3
"""Of a result's norm."""
MOST_BLOCKS = 64
"""Larger launches are left out."""


@dataclass(frozen=True)
class Kept:
    ptx: str
    grid: tuple[int, int, int]
    before: dict[str, Any]
    after: dict[str, torch.Tensor]
    shared: int
    threads: int

    def noticed(self, text: str) -> str:
        """Returns how a fault shows; "" if it does not."""
        given = {name: copied(value) for name, value in self.before.items()}
        try:
            launch(text, self.grid, given, self.shared, self.threads)
        except Hazard as hazard:
            return hazard.kind
        except (Unsupported, RuntimeError, IndexError, AssertionError) as error:
            return type(error).__name__
        return "result" if any(differs(given[name], want) for name, want in self.after.items()) else ""


def differs(ours: torch.Tensor, want: torch.Tensor) -> bool:
    if not ours.is_floating_point() or ours.element_size() == 1:
        return not torch.equal(ours.view(torch.uint8), want.view(torch.uint8))
    a, b = ours.double().nan_to_num(1e30), want.double().nan_to_num(1e30)
    return bool((a - b).norm() > TOLERANCE * b.norm())


def copied(value: Any) -> Any:
    """Returns a tensor with a storage of its own, as large and as aligned."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def keep(files: Sequence[str], chosen: str) -> list[Kept]:
    """Runs the tests and returns the first launch of each form."""
    kept: dict[str, Kept] = {}

    def keeping(ptx: str, grid: Any, arguments: dict[str, Any], shared: int, threads: int) -> Any:
        first = ptx not in kept and grid[0] * grid[1] * grid[2] <= MOST_BLOCKS
        before = {name: copied(value) for name, value in arguments.items()} if first else {}
        done = launch(ptx, grid, arguments, shared, threads)
        if first:
            after = {name: copied(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            kept[ptx] = Kept(ptx, grid, before, after, shared, threads)
        return done

    driver.launch = keeping  # type: ignore[assignment]
    status = pytest.main(
        ["-n0", "-q", "-p", "no:randomly", "-m", "not thorough", *files, *(["-k", chosen] * bool(chosen))]
    )
    if status:
        raise SystemExit("the tests fail without a fault")
    return list(kept.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if fewer than 95% are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("-k", dest="chosen", default="", help="only these tests, as pytest has it")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args(argv)
    every: dict[str, list[tuple[Kept, Mutation]]] = {}
    for one in keep(args.files, args.chosen):
        for mutation in mutations(one.ptx):
            every.setdefault(mutation.kind, []).append((one, mutation))
    rng = random.Random(0)
    for of_kind in every.values():
        rng.shuffle(of_kind)
    turns = range(max(map(len, every.values()), default=0))  # a fault of each kind in turn
    chosen = [of_kind[i] for i in turns for of_kind in every.values() if i < len(of_kind)]
    tried, seen, how = Counter[str](), Counter[str](), Counter[str]()
    for one, mutation in chosen[: args.count]:
        shown = one.noticed(mutation.applied(one.ptx))
        tried[mutation.kind] += 1
        seen[mutation.kind] += shown != ""
        how[shown or "not noticed"] += 1
        if not shown:
            name = next(line for line in one.ptx.split("\n") if ".entry" in line).split()[-1].rstrip("(")
            print(f"not noticed: {mutation.kind}, {name}, line {mutation.line}: {mutation.before.strip()}", flush=True)
    for kind in tried:
        print(f"{kind:10} {seen[kind]:4} of {tried[kind]}")
    print(f"noticed {sum(seen.values())} of {sum(tried.values())}; by {dict(how)}")
    return 1 if sum(seen.values()) < 0.95 * sum(tried.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
