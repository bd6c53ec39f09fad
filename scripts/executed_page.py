"""Writes docs/executed.md: which kernels' code for SM120 has been executed on a CPU, by op.

python scripts/execute_kernels.py --page
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sglang.ledger.why_slow import executed_counts

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
- two threads at one address of shared memory without a barrier between, also of one warp, or before the wait for a
  `cp.async`, be it to read or to write; what `ldmatrix` reads it reads for all threads of its warp;
- a barrier that some threads of a block do not reach, and an instruction of a warp that only some of its threads reach.

What a thread has not written in a register, though others have, is NaN.

    python -m sglang.ledger forms --sample 20  # which instructions 20 rows of the ledger have; all must be known

All 232 forms of instructions in 226 rows, at least one of each kernel, are known (2026-11-30).

## What launches ask of a card

    python -m sglang.explain --why-slow fused_moe/gate_up  # of an op, or of rows whose names begin so; --json too

Executions also count, of each row's largest launch: instructions of warps by class, `mma` by type, bytes of global
memory and the sectors of 32 bytes that they move, turns of shared memory and how many of them are conflicts of banks
(`python/sglang/ledger/executed_counts.json`, written with the record). The command prints them for COUNTED rows, and
which unit they would keep busy longest by the card's published rates. They are counts of small launches and of PTX: the
assembler joins some instructions and makes several of others. As features they do not make the
[cost model](../benchmark/results/card.md#counted-instructions) better.

## What it found

No fault that changes an answer. One kernel test could not have run on an SM120 GPU: its tile of fp32 values needs 132
KiB of shared memory, where SM120 has 99; it takes bfloat16 now.

In sums over threads the compiler fuses a thread's product with what it gets from another thread: of a * b + c * d one
thread rounds the first product, the other one the second. Both then write their sum to one place, and the ISA leaves
open which one stays, so that a result may differ in its last place. Such stores are counted. `channel_solve_kernel` was
looked at; launches of these kernels had some:CHOICES

## Faults put in

    python scripts/mutate_executed.py                 # every group below, and this table's record; about 20 minutes
    python scripts/mutate_executed.py norms routing   # some groups

puts one fault after the other into executed lines of PTX, as a kernel or a compiler might have it. Each is tried on up
to ten launches of the tests, those with the most work. It is noticed if an execution stops, or if a result changes by
more than tests allow, or at all where the right code writes nothing. Bytes of the arguments that the right code never
reads are NaN for this, and two blocks that write different values to one place stop the execution too, if those of the
right code do not and have no atomic operations.

FAULTS

A fault counts unless an execution proves that it cannot show on these launches. No other reason leaves one out:

- its line does in every thread what the right line does, each time: a mask that always holds, a wait whose copies are
  all zeros, threads that store what others store there, a barrier before which no thread touched shared memory;
- no result depends on what the line computes where the two differ: with these registers, or bytes of a copy, all ones
  instead (NaN, or the last address) nothing changes. This does not leave out limits, barriers, waits and stores.

## What it does not show

- **A GPU has been compared for a small part.** `lab/gpu/ptx_against_gpu.py` kept 190 launches of 24 kernels on an H200,
  with the tiles of SM120 compiled for that GPU, and executed the same PTX (2026-11-30). 127 gave the same bytes, 58
  differ by at most 13 last places (sums of tensor cores, approximate functions). Five say nothing: arguments that share
  memory had been kept apart, which has been repaired since, and an order that atomics decide.
- What the ISA leaves open is chosen here: sums of `mma.sync` are exact and rounded once, approximate functions are
  exact. A card may differ within the ISA's bounds.
- `ptxas`, which makes machine code of the PTX, is not executed, nor is the memory model: threads run in one order.
- Races are looked for in shared memory, not in global memory: there blocks of padding write to one slot. Of many blocks
  that are executed together those of about 2,048 threads are watched, evenly spread.
- Global memory counts as written, also where a launcher allocated it without values.
- Tests have small shapes. A row of the ledger counts as executed if a launch that it covers was. Tests of ops launch
  some rows; `test/ledger/rows/` launches rows of products, experts, attention and rotations one by one, each with its
  own tile, against the op's reference. The record has those that fitted into the time of its last run: `passed in part`
  below.
- Of the kernels in CUDA C++ (`sgl-kernel`) the products of experts are executed, as nvcc 13.0 compiles them for
  sm_120a. Those that exchange data between GPUs are not: they wait for other GPUs by a clock.
- Instructions that none of our kernels has are not known: `wgmma`, `tcgen05`, `mbarrier`, copies in bulk.

## By op

"Rows" are those of the ledger; "forms" are what Triton compiled for the tests' launches.
"""


FAULTS = {
    "mask": "an access to global memory, or a copy from there, has no mask",
    "limit": "`<=` in place of `<`",
    "barrier": "none of a block or a warp",
    "wait": "one for `cp.async` that ends one group early",
    "place": "a vector further in shared memory",
    "shuffle": "to another lane",
    "fragment": "two registers of an `mma` exchanged",
    "scale": "an `mma` takes the block scales of A for B",
}
"""Kinds of faults (`ptx/mutate.py`)."""


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
    introduction = INTRODUCTION.replace("CHOICES", named).replace("FAULTS", _faults())
    introduction = introduction.replace("COUNTED", str(len(executed_counts())))
    cuda = _cuda(sorted((kernel, count) for kernel, count in launches.items() if kernel.startswith("sgl-kernel")))
    parts = [introduction, "\n".join(lines), total, cuda, _missing(sorted(set(missing))), _files(record)]
    return "\n".join(parts)


def _faults() -> str:
    """Returns how many faults were noticed, and the table by kind of fault and group of kernels."""
    record: dict[str, dict[str, dict[str, int]]] = json.loads((LEDGER / "executed_faults.json").read_text())
    lines = [f"- {kind}: {what}" for kind, what in FAULTS.items()] + [""]
    lines += [f"| kernels | {' | '.join(FAULTS)} | together | left out |", "|" + "---|" * (len(FAULTS) + 3)]
    sums: dict[str, int] = defaultdict(int)
    for name, kinds in record.items():
        cells = []
        for kind in FAULTS:
            one = kinds.get(kind, {"counted": 0, "noticed": 0})
            cells.append(f"{one['noticed']} of {one['counted']}" if one["counted"] else "-")
        tried, counted, noticed = (sum(one[what] for one in kinds.values()) for what in ("tried", "counted", "noticed"))
        for what, number in (("tried", tried), ("counted", counted), ("noticed", noticed)):
            sums[what] += number
        lines.append(f"| {name} | {' | '.join(cells)} | {noticed} of {counted} | {tried - counted} |")
    said = (
        f"Of {sums['counted']} faults that count {sums['noticed']} were noticed,"
        f" {100 * sums['noticed'] / sums['counted']:.1f}%. {sums['tried'] - sums['counted']} more cannot show and are"
        " left out. Of each\nkind of kernel and of fault, how many of how many were noticed:"
    )
    return "\n".join([said, "", *lines])


def _cuda(kernels: list[tuple[str, int]]) -> str:
    """Returns the sentence about kernels in CUDA C++."""
    named = [f"- `{name.removeprefix('sgl-kernel ')}`: {count} launches" for name, count in kernels]
    return "\n".join(["Kernels of `sgl-kernel`, in no row of the ledger:", "", *named, ""])


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
