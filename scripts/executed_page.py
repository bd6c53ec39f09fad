"""Writes docs/executed.md: which kernels' code for SM120 has been executed on a CPU, by op.

python scripts/execute_kernels.py --page
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "python" / "sglang" / "ledger"
PAGE = ROOT / "docs" / "executed.md"

INTRODUCTION = """\
# What has been executed

For those who ask whether a kernel's code for SM120 has ever run.
No SM120 GPU has run this server yet. But the PTX that Triton makes for it has been executed on a CPU, instruction by
instruction, for the kernels of this page. The page is generated of `python/sglang/ledger/executed.json`:

    python scripts/execute_kernels.py          # runs every kernel's tests so, and records them
    python scripts/execute_kernels.py --page   # writes this page

## How

`python/sglang/ledger/ptx/` reads PTX for sm_120 and computes it with numpy, for all threads of many blocks at once:
fragments of `mma.sync` with their block scales, `ldmatrix`, `cp.async` and its groups, shuffles, atomics, barriers,
and threads that part and meet again. Each instruction follows a section of the PTX ISA, and has tests against its
words (`test/ledger/`). One that is not known is refused, with the kernel and the line.

Kernels' tests run over it with the tiles that SM120 gets. So launchers, tiles, compiler and layouts are those of a
card, and each result is compared with the reference of its op.

An execution also stops at what hardware may let pass:

- an access outside of an array, with the array's name and the source line, or one that is not aligned;
- a read of shared or local memory, or of a register, that nobody wrote;
- two threads at one address of shared memory without a barrier between, or before the wait for a `cp.async`;
- a barrier that some threads of a block do not reach, and an instruction of a warp that only some of its threads reach.

    python -m sglang.ledger forms --sample 20  # which instructions 20 rows of the ledger have; all must be known

All 232 forms of instructions in 226 rows, at least one of each kernel, are known (2026-11-30).

## What it found

No fault that changes an answer. In sums over threads the compiler fuses a thread's product with what it gets from
another thread: of a * b + c * d one thread rounds the first product, the other one the second. Both then write their
sum to one place, and the ISA leaves open which one stays, so that a result may differ in its last place. Such stores
are counted. `channel_solve_kernel` was looked at; launches of these kernels had some:CHOICES

## Faults put in

    python scripts/mutate_executed.py --count 60 test/srt/layers/test_gemv.py

puts one fault after the other into executed lines of PTX, as a kernel or a compiler might have it, and counts those
that stop the execution or change a result by more than a thousandth. 60 each of quantized products and of attention
over prefixes, 40 of norms (2026-11-30):

| fault | products | attention | norms |
|---|---|---|---|
| a barrier is missing | 7 of 7 | 7 of 8 | 8 of 8 |
| a wait for `cp.async` ends one group early | 7 of 7 | 5 of 9 | - |
| two registers of a fragment of `mma` are exchanged | 7 of 7 | 3 of 8 | - |
| the block scale of a neighbouring column | 7 of 7 | - | - |
| a shuffle goes to another lane | 8 of 8 | 8 of 8 | 8 of 8 |
| an access to shared memory is a vector too far on | 8 of 8 | 9 of 9 | 8 of 8 |
| an access to global memory has no mask | 6 of 8 | 6 of 9 | 6 of 8 |
| a limit counts as inside (`<` becomes `<=`) | 7 of 8 | 2 of 9 | 3 of 8 |
| together | 57 of 60 | 40 of 60 | 33 of 40 |

That is 130 of 160, where 95% are wanted. Those that are left have not been examined one by one. Many change what no
result depends on: rows of a tile beyond the last token, whose products nobody reads; waits behind which nothing is
read; masks of loads within a larger array. Problems that fill their tiles would show more.

## What it does not show

- **A GPU has been compared for a small part.** `lab/gpu/ptx_against_gpu.py` kept 190 launches of 24 kernels on an H200,
  with the tiles of SM120 compiled for that GPU, and executed the same PTX (2026-11-30). 127 gave the same bytes, 58
  differ by at most 13 last places (sums of tensor cores, approximate functions). Five say nothing: arguments that share
  memory had been kept apart, which has been repaired since, and an order that atomics decide.
- What the ISA leaves open is chosen here: sums of `mma.sync` are exact and rounded once, approximate functions are
  exact. A card may differ within the ISA's bounds.
- `ptxas`, which makes machine code of the PTX, is not executed, nor is the memory model: threads run in one order.
- Races are looked for in shared memory, not in global memory. Of more than eight blocks that are executed together, the
  first and the last four are watched.
- Global memory counts as written, also where a launcher allocated it without values.
- Tests have small shapes. A row of the ledger counts as executed if a launch that it covers was.
- Kernels in CUDA C++ (`sgl-kernel`) are not executed, nor instructions that none of our kernels has: `wgmma`,
  `tcgen05`, `mbarrier`, copies in bulk.

## By op

"Rows" are those of the ledger; "forms" are what Triton compiled for the tests' launches.
"""


def kernels_by_op() -> dict[str, dict[str, set[str]]]:
    """Returns op -> kernel -> names of its rows, of SM120's ledger."""
    ops: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for kernel, rows in json.loads((LEDGER / "sm120.forms.json").read_text()).items():
        for row in rows:
            if row != "every row":
                ops[row.partition("/")[0]][kernel].add(row)
    return ops


def page() -> str:
    """Returns the page."""
    record: dict[str, Any] = json.loads((LEDGER / "executed.json").read_text())
    launches: dict[str, int] = defaultdict(int)
    forms: dict[str, int] = defaultdict(int)
    rows: set[str] = set()
    instructions: set[str] = set()
    lanes = 0
    for entry in record.values():
        if entry["result"] == "failed":
            continue
        instructions.update(entry["instructions"])
        for kernel, one in entry["kernels"].items():
            launches[kernel] += one["launches"]
            forms[kernel] += one["forms"]
            lanes += one["lanes"]
            rows.update(one["rows"])
    lines = ["| op | kernels | of them executed | launches | forms | rows | of them executed |", "|" + "---|" * 7]
    missing = []
    ops = kernels_by_op()
    for op in sorted(ops):
        kernels = ops[op]
        done = [kernel for kernel in kernels if launches[kernel]]
        missing += [f"`{kernel}`" for kernel in kernels if not launches[kernel]]
        named = set().union(*kernels.values())
        lines.append(
            f"| {op} | {len(kernels)} | {len(done)} | {sum(launches[k] for k in kernels):,} |"
            f" {sum(forms[k] for k in kernels)} | {len(named)} | {len(named & rows)} |"
        )
    every = {kernel for kernels in ops.values() for kernel in kernels}
    executed = sum(1 for kernel in every if launches[kernel])
    all_rows = set().union(*(names for kernels in ops.values() for names in kernels.values()))
    total = (
        f"\nTogether: {executed} of {len(every)} kernels, {sum(launches.values()):,} launches, {sum(forms.values())}"
        f" forms,\n{len(all_rows & rows)} of {len(all_rows):,} rows, {len(instructions)} forms of instructions,"
        f" {lanes / 1e9:.1f} billion instructions of threads.\n"
    )
    choices = sorted({kernel for e in record.values() for kernel, one in e["kernels"].items() if one.get("choices")})
    named = "".join(f"\n\n- `{kernel}`" if i == 0 else f"\n- `{kernel}`" for i, kernel in enumerate(choices))
    introduction = INTRODUCTION.replace("CHOICES", named)
    parts = [introduction, "\n".join(lines), total, _missing(sorted(set(missing))), _files(record)]
    return "\n".join(parts)


def _missing(kernels: list[str]) -> str:
    if not kernels:
        return "Every kernel has been executed.\n"
    return "Not executed yet:\n\n" + "\n".join(f"- {kernel}" for kernel in kernels) + "\n"


def _files(record: dict[str, Any]) -> str:
    lines = ["## By file of tests", "", "| file | last run | result |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {e['date']} | {e['result']} |" for name, e in record.items())]) + "\n"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
