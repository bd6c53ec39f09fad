"""Changes the core of the server in one place at a time, and counts which of these changes the tests notice.

    make mutations                                    # 120 changes, hours on two cores, eight minutes on 48
    python scripts/mutations.py --count 12 --rooms step graphs --jobs 2 --out build/mutations

The changes are those of cosmic-ray: another operator, comparison or number, a negated condition, `break` for `continue`
and the like. They are drawn at random, equally many from every part of the core; what has no effect when the code runs
is left out: annotations, assertions, code for type checkers and texts. OUT/changes.json keeps them; where that file is
there already, cosmic-ray is not needed.

First every file of tests runs once without a change, and it is recorded which tests run the lines that will change and
how long they take; what fails then is left out. Then each change is made in a copy of the tree, in which the tests run
that run it, the short ones first, until one fails; it must pass without the change once more. A change that makes the
tests hang or that keeps them from being imported is noticed too. OUT/tests and OUT/outcomes.json keep what is known: a
run that was interrupted goes on from there. With --unmeasured the first step is left out, and those files of tests run
whole that notice most. Printed at the end: how many were noticed, by part, and each survivor.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mutation.changes import ROOMS, ROOT, Change, draw
from mutation.tests import TESTS, Measured, test_files
from mutation.trials import Clock, Outcome, OutOfTime, compiled_tree, session, try_out

T = TypeVar("T")


def change_of(data: dict[str, Any]) -> Change:
    return Change(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def changes(path: Path, rooms: list[str], count: int, seed: int) -> list[Change]:
    """Those of the file; else drawn, and written there."""
    if not path.exists():
        path.write_text(json.dumps([asdict(change) for change in draw(rooms, count, seed)], indent=1))
    return [change_of(data) for data in json.loads(path.read_text())]


def outcomes_of(path: Path) -> list[Outcome]:
    data = json.loads(path.read_text()) if path.exists() else []
    return [Outcome(**{**outcome, "change": change_of(outcome["change"])}) for outcome in data]


def side_by_side(jobs: int, calls: Iterable[Callable[[], T]]) -> Iterable[T]:
    """Results as they come, without those for which no time was left."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(call) for call in calls]):
            try:
                yield future.result()
            except OutOfTime:
                continue
            except (OSError, ValueError) as error:
                print(f"not tried: {error}", flush=True)


class Run:
    def __init__(self, out: Path, jobs: int, clock: Clock, folder: Path) -> None:
        self.out, self.jobs, self.clock, self.folder = out, jobs, clock, folder
        self.plain = compiled_tree(folder / "plain")

    def measure(self, files: list[str], drawn: list[Change], limit_s: float) -> Measured:
        """Runs files without a change. One that takes longer than `limit_s` is known by its tests till then."""
        kept = self.out / "tests"
        kept.mkdir(exist_ok=True)
        lines: dict[str, list[int]] = {}
        for change in drawn:
            first, last = change.statement
            lines[change.module] = sorted({*lines.get(change.module, []), *range(first, last + 1)})

        def record(number: int, file: str) -> tuple[str, dict[str, Any]]:
            path = kept / (file.replace("/", "-") + ".json")
            if not path.exists():
                scratch = self.folder / f"f{number}"  # short, since sockets lie there
                only = {"MUTATION_LINES": lines, "MUTATION_SECONDS": limit_s}
                result = session(self.plain, [file], self.clock, 2 * limit_s, scratch, **only)
                shutil.rmtree(scratch, ignore_errors=True)
                print(f"{file}: {result.seconds:.0f} s, {len(result.record.get('failed', []))} failed", flush=True)
                if result.status != 0:
                    print(result.tail[-400:], flush=True)
                path.write_text(
                    json.dumps(result.record or {"seconds": {}, "failed": [file], "lines": {}, "processes": False})
                )
            return file, json.loads(path.read_text())

        measured = Measured()
        for file, known in side_by_side(self.jobs, [partial(record, *numbered) for numbered in enumerate(files)]):
            measured.add(file, known)
        return measured

    def try_all(self, drawn: list[Change], measured: Measured) -> list[Outcome]:
        path = self.out / "outcomes.json"
        outcomes = outcomes_of(path)
        known = {outcome.change for outcome in outcomes}
        calls = [
            partial(try_out, change, measured, self.plain, self.folder / str(n), self.clock)
            for n, change in enumerate(drawn)
            if change not in known
        ]
        for outcome in side_by_side(self.jobs, calls):
            outcomes.append(outcome)
            place = f"{outcome.change.module}:{outcome.change.line}"
            print(f"{outcome.seconds:4.0f} s {place}: {outcome.noticed_by or 'SURVIVED'}"[:160], flush=True)
            path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
        return [outcome for outcome in outcomes if outcome.change in set(drawn)]


def table(drawn: list[Change], outcomes: list[Outcome]) -> str:
    survivors = [outcome for outcome in outcomes if not outcome.noticed]
    lines = ["", f"{len(survivors)} survivors, with the number of tests that ran:"]
    lines += [f"{outcome.tests} tests: {outcome.change.difference()}" for outcome in survivors]
    lines += ["", "| part | changes | tried | noticed |", "|---|--:|--:|--:|"]
    for room in dict.fromkeys(change.room for change in drawn):
        tried = [outcome for outcome in outcomes if outcome.change.room == room]
        noticed = sum(outcome.noticed for outcome in tried)
        lines.append(f"| {room} | {sum(change.room == room for change in drawn)} | {len(tried)} | {noticed} |")
    noticed = sum(outcome.noticed for outcome in outcomes)
    by_test = sum("::" in outcome.noticed_by for outcome in outcomes)
    lines.append(f"| all | {len(drawn)} | {len(outcomes)} | {noticed} |")
    lines += ["", f"{by_test} by a test that failed, {noticed - by_test} because tests hung or were not imported"]
    return "\n".join(
        [*lines, f"noticed: {noticed / len(outcomes):.1%} of those tried" if outcomes else "none was tried"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="changes altogether")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--jobs", type=int, default=2, help="sessions of pytest at once")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds; prints what is known then")
    parser.add_argument("--file-limit", type=float, default=600.0, help="seconds of a file of tests without a change")
    parser.add_argument("--unmeasured", action="store_true", help="whole files of tests, those that notice most")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="patterns of files, instead of all")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutations", help="folder of changes and outcomes")
    args = parser.parse_args()
    clock = Clock(args.limit)
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = changes(args.out / "changes.json", args.rooms, args.count, args.seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(args.out, args.jobs, clock, Path(folder).resolve())
        if args.unmeasured:
            measured = Measured()
            measured.unmeasured()
        else:
            measured = run.measure(test_files(args.tests), drawn, args.file_limit)
            unreached = [change for change in drawn if not measured.tests_of(change)]
            passing = len(measured.seconds.keys() - measured.failed)
            print(f"{passing} tests; no test runs {len(unreached)} of {len(drawn)} changes", flush=True)
        outcomes = run.try_all(drawn, measured)
    print(table(drawn, outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
