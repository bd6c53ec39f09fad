"""`python -m sglang.ledger check|update|report|forms|serve`: the proof that every tile fits, kept in lock files.

check    the recorded numbers obey the rules and were not edited; a sample of rows still compiles to them. Each commit
         takes the next sample, so over as many commits as there are samples every row is compiled
update   measure what changed, with this Triton and with those that --triton names, and write the lock files
report   counts and worst cases
forms    the forms of PTX instructions in rows, and whether the executor (`sglang.ledger.ptx`) knows them all
serve    a server that may only launch variants with a row; its flags are those of any server
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sglang.ledger import rules
from sglang.ledger.compile import variant_hash
from sglang.ledger.lock_writer import digest_of, write_lock
from sglang.ledger.measure import Job, all_jobs, measure, targets, to_rows, variant_table
from sglang.ledger.targets import NOT_NATIVE, TRITON_VERSIONS
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.kernels.ledger_file import (
    DEQUANTIZED_TAIL,
    LOCKS,
    Ledger,
    LedgerRows,
    Measurement,
    Row,
    RowKey,
    read_lock,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        from sglang.ledger.checked_server import serve_checked

        serve_checked(words[1:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m sglang.ledger", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("check", "update", "report"):
        command = commands.add_parser(name)
        command.add_argument("--lock", choices=sorted(LOCKS), action="append", help="only this lock file")
        if name != "report":
            command.add_argument("--processes", type=int, default=2)
            command.add_argument("--all", action="store_true", help="compile every row, changed or not")
            command.add_argument("--only", default="", help="only rows whose op/key/tile contains this")
        if name == "check":
            command.add_argument("--sample", type=int, default=4, help="rows of each lock file to compile")
            command.add_argument("--turn", type=int, help="which sample (default: the number of commits)")
        if name == "update":
            command.add_argument(
                "--triton", type=Path, action="append", default=[], help="directory with another Triton"
            )
            command.add_argument("--only-measure", type=Path, help=argparse.SUPPRESS)
    command = commands.add_parser("forms")
    command.add_argument("--only", default="", help="only rows whose op/key/tile contains this")
    command.add_argument("--sample", type=int, help="only as many rows")
    command.add_argument("--turn", type=int, default=0, help="which sample")
    args = parser.parse_args(words)
    if args.command == "forms":
        return forms(args)
    args.lock = args.lock or sorted(LOCKS)
    return {"check": check, "update": update, "report": report}[args.command](args)


def check(args: argparse.Namespace) -> int:
    """Prints where lock files break a rule or differ from compiled kernels. Returns 1 if they do."""
    problems: list[str] = list(rules.rows_without_tile(Ledger.load()))
    for lock in args.lock:
        rows, table = read_lock(lock), variant_table(lock)
        problems += rules.edited(lock, rows)
        problems += rules.missing(lock, rows, table)
        problems += rules.over_limit(lock, rows)
        problems += rules.over_spill_budget(lock, rows, table)
        problems += _drift(lock, rows, args)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problem(s)" if problems else "ledger: all rules hold")
    if problems:
        print(
            "After a change of kernels or tiles: python scripts/record_launches.py, then"
            " python -m sglang.ledger update --triton DIR (docs/kernels.md says how to get DIR)"
        )
    return 1 if problems else 0


def _drift(lock: str, rows: LedgerRows, args: argparse.Namespace) -> list[str]:
    """Returns rows whose code changed since they were measured, and measured rows that now compile to other numbers."""
    import triton

    table = variant_table(lock)
    changed = [key for key, row in rows.items() if key in table and row.code != variant_hash(table[key])]
    problems = [f"{lock}: {'/'.join(key)}: the kernel changed since it was measured" for key in changed]
    if triton.__version__ not in TRITON_VERSIONS:
        print(f"Triton {triton.__version__} is not in the lock files: nothing is compiled")
        return problems
    recorded = [key for key in rows if key in table and key not in changed and args.only in "/".join(key)]
    if not args.all:
        recorded = sample(recorded, args.sample, _commits() if args.turn is None else args.turn)
        print(f"{lock}, Triton {triton.__version__}: compiling {', '.join('/'.join(key) for key in recorded)}")
    jobs = [Job(lock, key, targets(lock, table[key], triton.__version__)) for key in recorded]
    for job, result in measure(jobs, args.processes, progress=False).items():
        if isinstance(result, str):
            problems.append(f"{lock}: {result}")
            continue
        for arch, now in result.items():
            recorded_value = rows[job.row].by_target.get(f"{triton.__version__}/{arch}")
            if recorded_value is not None and now != recorded_value:
                problems.append(f"{lock}: {'/'.join(job.row)} on {arch}: recorded {recorded_value}, now {now}")
    return problems


def sample(rows: Sequence[RowKey], size: int, turn: int) -> list[RowKey]:
    """Returns `size` of the rows, with each turn the next ones, in an order that mixes kernels."""
    ordered = sorted(rows, key=lambda key: hashlib.sha256("/".join(key).encode()).digest())
    size = min(size, len(ordered))
    return [ordered[(turn * size + i) % len(ordered)] for i in range(size)]


def _commits() -> int:
    """Returns the number of commits up to this version, so that every commit has its own turn; 0 outside of a full
    clone."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except FileNotFoundError:
        return 0
    if shallow == "true":
        return int(git("rev-parse", "HEAD")[:8], 16)
    return int(git("rev-list", "--count", "HEAD") or 0)


def update(args: argparse.Namespace) -> int:
    """Measures with this Triton; for each --triton directory, runs this module again with that Triton."""
    import triton

    failures: list[str] = []
    for lock in args.lock:
        known = {} if args.all else _unedited(lock)
        jobs = all_jobs(lock, args.only, known, triton.__version__)
        print(f"{lock}, Triton {triton.__version__}: {len(jobs)} to compile", file=sys.stderr)
        fresh, failed = to_rows(lock, measure(jobs, args.processes), triton.__version__)
        failures += failed
        if args.only_measure:
            (args.only_measure / f"{lock}.json").write_text(
                json.dumps([[*key, row.code, row.by_target] for key, row in fresh.items()])
            )
            continue
        for directory in args.triton:
            _merge(fresh, _measure_with(directory, lock, args))
        write_lock(lock, _combined(lock, known, fresh))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def _unedited(lock: str) -> LedgerRows:
    """Returns the rows that need not be measured again."""
    return {key: row for key, row in read_lock(lock).items() if row.digest == digest_of(key, row)}


def _measure_with(directory: Path, lock: str, args: argparse.Namespace) -> LedgerRows:
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "sglang.ledger", "update", "--lock", lock, "--only-measure", out]
        command += ["--processes", str(args.processes), "--only", args.only] + (["--all"] if args.all else [])
        subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": path})
        content = json.loads((Path(out) / f"{lock}.json").read_text())
    return {
        (op, key, tile): Row(code, {t: _measurement(m) for t, m in values.items()})
        for op, key, tile, code, values in content
    }


def _measurement(values: Sequence[object]) -> Measurement:
    smem, registers, spills, stack, mma = values
    return smem, registers, spills, stack, tuple(mma)  # type: ignore[return-value,arg-type]


def _merge(into: LedgerRows, rows: LedgerRows) -> None:
    """Adds measurements: replaces those of other code, completes those of the same code."""
    for key, row in rows.items():
        if key not in into or into[key].code != row.code:
            into[key] = Row(row.code)
        into[key].by_target.update(row.by_target)


def _combined(lock: str, known: LedgerRows, fresh: LedgerRows) -> LedgerRows:
    """Returns the table's known rows updated with fresh ones; `check` reports those whose code changed."""
    combined = {key: Row(row.code, dict(row.by_target)) for key, row in known.items() if key in variant_table(lock)}
    _merge(combined, fresh)
    return combined


def report(args: argparse.Namespace) -> int:
    """Prints a summary of each lock file. Returns 0."""
    for lock in args.lock:
        rows, table = read_lock(lock), variant_table(lock)
        values = [(key, target, m) for key, row in rows.items() for target, m in row.by_target.items()]
        if not values:
            print(f"{lock}: empty")
            continue
        defaults = [v for v in values if v[0] in table and table[v[0]].default and v[1] not in NOT_NATIVE]
        worst = max(values, key=lambda v: v[2][0])
        spilling = max(defaults, key=lambda v: v[2][2])
        print(f"{lock} ({', '.join(LOCKS[lock])}; Triton {', '.join(TRITON_VERSIONS)})")
        print(f"  {len(rows)} (kernel, variant, tile) rows, {len(values)} measurements")
        print(f"  most shared memory: {worst[2][0]:,} B, {'/'.join(worst[0])} on {worst[1]}")
        print(f"  over the limit: {len(list(rules.over_limit(lock, rows)))}")
        spilling_rows = len({v[0] for v in defaults if v[2][2] > 0})
        print(f"  default tiles that spill: {spilling_rows} of {len({v[0] for v in defaults})}")
        print(f"  most spilled by a default tile: {spilling[2][2]} B, {'/'.join(spilling[0])} on {spilling[1]}")
        for kind in sorted({kind for v in values for kind in v[2][4]}):
            print(f"  {kind}: {len({v[0] for v in values if kind in v[2][4]})} rows")
        _report_schemes(values)
    return 0


def forms(args: argparse.Namespace) -> int:
    """Prints the forms of instructions of SM120's rows by the number of rows. Returns 1 if one is not known."""
    from sglang.ledger.ptx.rows import forms_of, ptx_of

    table = variant_table("sm120")
    keys = [key for key in table if args.only in "/".join(key)]
    if args.sample is not None:
        keys = sample(keys, args.sample, args.turn)
    rows, refused = forms_of((key, ptx_of(table[key], "sm_120")) for key in keys)
    for form, count in rows.most_common():
        print(f"{count:>5} {form}")
    print(f"{len(keys)} rows, {len(rows)} forms, {len(refused)} rows that cannot be executed")
    for message in refused:
        print(message)
    return 1 if refused else 0


def _report_schemes(values: Sequence[tuple[RowKey, str, Measurement]]) -> None:
    """Prints the worst cases of quantized variants, by op and scheme, where the compiler is native."""
    by_scheme: dict[tuple[str, str], list[tuple[RowKey, Measurement]]] = defaultdict(list)
    for row, target, measurement in values:
        op, key, _ = row
        tail = DEQUANTIZED_TAIL if DEQUANTIZED_TAIL in key else ""
        for scheme in SCHEMES.keys() & key.split("/") if target not in NOT_NATIVE else ():
            by_scheme[op, scheme + tail].append((row, measurement))
    print(f"  {'op':<19} {'scheme':<19} {'rows':>4} {'smem':>8} {'regs':>5} {'spill':>5}  mma")
    for (op, scheme), rows in sorted(by_scheme.items()):
        smem, registers, spills = (max(m[i] for _, m in rows) for i in range(3))
        mma = ", ".join(sorted({kind for _, m in rows for kind in m[4]}))
        print(f"  {op:<19} {scheme:<19} {len({r for r, _ in rows}):>4} {smem:>8,} {registers:>5} {spills:>5}  {mma}")
