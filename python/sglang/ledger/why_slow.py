"""Says which unit of a card a kernel would keep busy longest, by counts of executed launches: `explain --why-slow OP`.

The counts are in `executed_counts.json`, by file of tests and row of the ledger: what the row's largest launch there
asked for (`ptx/counts.py`). A unit's time is its count over its rate, with the work spread evenly over all SMs: waits,
launches and SMs without a block are left out, so that it is no prediction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.tuning.rates import Rates, ceilings_of, rates_of

COUNTS = Path(__file__).with_name("executed_counts.json")
SCHEDULERS = 4
"""Of an SM: each issues an instruction of a warp a clock."""
SPECIAL_LANES = 16
"""Of an SM, for exponents, roots and divisions."""
Counted = Mapping[str, Any]


def executed_counts(path: Path = COUNTS) -> dict[str, Counted]:
    """Returns the counts of each row: those of the launch with the most blocks of all files of tests."""
    rows: dict[str, Counted] = {}
    for counted in json.loads(path.read_text()).values():
        for row, counts in counted.items():
            if row not in rows or _blocks(counts) > _blocks(rows[row]):
                rows[row] = counts
    return dict(sorted(rows.items()))


def rows_of(op: str, path: Path = COUNTS) -> dict[str, Counted]:
    """Returns the counts of an op's rows; `op` may go on as their names do ("fused_moe/gate_up"). Raises UserError if
    no row of it was executed."""
    rows = executed_counts(path)
    chosen = {row: counts for row, counts in rows.items() if row == op or row.startswith(f"{op.rstrip('/')}/")}
    if not chosen:
        known = ", ".join(sorted({row.partition("/")[0] for row in rows}))
        raise UserError(f"--why-slow {op}: no row of that name was executed (docs/executed.md); known: {known}")
    return chosen


def busy(counts: Counted, arch: ArchTraits) -> dict[str, float]:
    """Returns the microseconds that each unit works. Raises UserError for a card without known rates."""
    rates, read = rates_of(arch), ceilings_of(arch).read
    issued = sum(number for kind, number in counts["instructions"].items() if kind != "move")
    every = arch.num_sms * rates.clock
    seconds = {
        "instructions": issued / SCHEDULERS / every,
        "special functions": counts["instructions"].get("special", 0) * 32 / SPECIAL_LANES / every,
        "matrix unit": _matrix_seconds(counts["mma"], rates),
        "shared memory": counts["shared"]["turns"] / every,
        "L2": counts["global"]["sectors"] * 32 / rates.l2_bytes_per_clock / every,
        "memory": counts["global"]["touched"] / read,
    }
    return {unit: time * 1e6 for unit, time in seconds.items()}


def _matrix_seconds(mma: Mapping[str, int], rates: Rates) -> float:
    total = 0.0
    for kind, warps in mma.items():
        m, n, k = _shape(kind)
        total += warps * 2 * m * n * k / rates.slowest_rate((kind,))
    return total


def _shape(kind: str) -> tuple[int, int, int]:
    """Returns the sizes in "m16n8k16 bf16"."""
    m, _, rest = kind.split()[0].removeprefix("m").partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def why_slow_json(op: str, arch: ArchTraits) -> dict[str, Any]:
    """Returns the counts of an op's rows and how long units work, by row. Raises UserError."""
    return {row: {**counts, "busy_us": busy(counts, arch)} for row, counts in rows_of(op).items()}


def why_slow_lines(op: str, arch: ArchTraits) -> list[str]:
    """Returns what `explain --why-slow` prints. Raises UserError."""
    rows = rows_of(op)
    lines = [
        f"{op}, {len(rows)} rows of the ledger, on {arch.product or arch.name}: what launches ask of its units.",
        "They were executed on a CPU, for tests, with small shapes; no GPU ran them. Instructions are PTX's, of warps.",
        "A unit's time is its count over its rate, on all SMs; what waits, and what starts a launch, is left out.",
    ]
    for row, counts in rows.items():
        lines += ["", *_lines(row, counts, busy(counts, arch))]
    return lines


def _lines(row: str, counts: Counted, times: Mapping[str, float]) -> Iterator[str]:
    moved, shared = counts["global"], counts["shared"]
    classes = sorted(counts["instructions"].items(), key=lambda one: -one[1])
    longest = max(times.values())
    order = sorted(times.items(), key=lambda one: -one[1])
    yield f"{row}: {counts['kernel']}, {_blocks(counts):,} blocks of {counts['threads']} threads"
    yield "  instructions   " + ", ".join(f"{kind} {number:,}" for kind, number in classes)
    if counts["mma"]:
        yield "  mma            " + ", ".join(f"{kind}: {number:,}" for kind, number in counts["mma"].items())
    if moved["sectors"]:
        share = moved["asked"] / (32 * moved["sectors"])
        yield (
            f"  global memory  {moved['asked']:,} B asked for, in {moved['sectors']:,} sectors of 32 B ({share:.0%}),"
            f" {moved['touched']:,} B different"
        )
    if shared["turns"]:
        yield f"  shared memory  {shared['turns']:,} turns, {shared['conflicts']:,} of them conflicts of banks"
    if longest:
        yield f"  busy longest   {order[0][0]}; " + ", ".join(f"{unit} {time / longest:.0%}" for unit, time in order)


def _blocks(counts: Counted) -> int:
    x, y, z = counts["grid"]
    return int(x * y * z)
