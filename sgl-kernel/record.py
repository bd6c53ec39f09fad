"""What the kernels of sgl-kernel cost, on record in kernels.lock.json.

    python sgl-kernel/record.py            compile, and compare with the record
    python sgl-kernel/record.py --update   compile, and write it

Needs nvcc and, for the machine code, cuobjdump: the CUDA toolkit's or the one that Triton brings. No GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nvcc_build import SOURCES, compile_library, find_nvcc

ROOT = Path(__file__).resolve().parent
FILE = ROOT / "kernels.lock.json"
TARGETS = ("90a", "120f", "121f")
"""One sm_120f cubin runs on both; sm_121's own code is looked at as well."""
SHARED_LIMIT = 101_376
PRODUCT = "QMMA.SF.16832.F32.E4M3.E2M1.E8"
SPREAD = "LDSM.U4x16P64TO8.M816.4"
FENCE, FLUSH = "MEMBAR.ALL.SYS", "CCTL.IVALL"
"""Before a flag is written, and after it was read."""
FLAG_READ, FLAG_WRITTEN = "LDG.E.STRONG.SYS", "STG.E.STRONG.SYS"
WAIT, LET_BEGIN = "ACQBULK", "PREEXIT"
"""Until the kernel ahead has ended; from where on the kernel behind may begin, which then waits itself."""
WORDS_READ, WORDS_WRITTEN = "LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Source:
    """Kernels of a file in csrc/. `kernel` finds one in a symbol, `name` says what it is called here, `instructions`
    those to count."""

    file: str
    targets: tuple[str, ...]
    kernel: re.Pattern[str]
    name: Callable[[re.Match[str]], str]
    instructions: re.Pattern[str]
    shared: Callable[[ctypes.CDLL, re.Match[str]], int] | None = None  # where a launch asks for it


def _product_name(kernel: re.Match[str]) -> str:
    m, n, stages, gated = kernel.groups()
    return f"{'gate_up' if gated == '1' else 'down'} {m}x{n}x128 {stages} stages"


def _product_rules(name: str, instructions: Mapping[str, int]) -> Iterable[str]:
    if not instructions.get(PRODUCT) or not instructions.get(SPREAD):
        yield f"lacks {PRODUCT} or {SPREAD}: {instructions}"
    others = [found for found in instructions if "MMA" in found and found != PRODUCT]
    if others:
        yield f"multiplies with {', '.join(others)} as well"


ALGORITHMS = ("packed", "one_shot", "two_shot", "two_shot_e4m3")


def _collective_name(kernel: re.Match[str]) -> str:
    *of_sum, exchanged = kernel.groups()
    if exchanged is not None:
        return f"exchange {ALGORITHMS[int(exchanged)]}"
    dtype, fused, algorithm = (int(number) for number in of_sum)
    return f"all_reduce {ALGORITHMS[algorithm]} {('bfloat16', 'float16', 'float32')[dtype]}{' norm' * fused}"


def _collective_rules(name: str, instructions: Mapping[str, int]) -> Iterable[str]:
    """What the memory model asks for is there, and what PCIe does not have is not."""
    packed = name.split()[1] == "packed"
    wanted = (WORDS_READ, WORDS_WRITTEN) if packed else (FENCE, FLUSH, FLAG_READ, FLAG_WRITTEN)
    wanted += (WAIT, LET_BEGIN)
    lacking = [each for each in wanted if not instructions.get(each)]
    if name.split()[1] == "two_shot_e4m3" and not any(
        each.startswith("F2FP") and "E4M3" in each for each in instructions
    ):
        yield f"converts to e4m3 without an instruction for it: {instructions}"
    if lacking:
        yield f"lacks {', '.join(lacking)}"
    atomic = [each for each in instructions if each.startswith(("ATOM", "RED", "LDGMC", "MULTIMEM"))]
    if atomic:
        yield f"has {', '.join(atomic)}, which no PCIe link carries"


SOURCE_FILES = (
    Source(
        "mixed_moe.cu",
        ("120f", "121f"),
        re.compile(r"mixed_moe_kernelINS_4TileILi(\d+)ELi(\d+)ELi\d+ELi\d+ELi(\d+)EEELb(\d)E"),
        _product_name,
        re.compile(r"\b((?:QMMA|OMMA|HMMA|IMMA|LDSM)\.[A-Za-z0-9_.]+)"),
        lambda library, kernel: int(library.sgl_mixed_moe_shared_bytes(int(kernel[1]))),
    ),
    Source(
        "all_reduce.cu",
        TARGETS,
        re.compile(r"(?:all_reduce_kernelILi(\d)ELb(\d)ELi(\d)|exchange_kernelILi(\d))E"),
        _collective_name,
        re.compile(
            r"(?<![\w.])(ACQBULK|PREEXIT|F2FP\.[\w.]*E4M3[\w.]*|MEMBAR\.[\w.]*SYS|CCTL\.IVALL|(?:LDG|STG)\.[\w.]*SYS|(?:ATOMG?|REDG?|LDGMC|MULTIMEM)\.[\w.]+)"
        ),
    ),
)


def sources_digest() -> str:
    """Of what is compiled. An edit shows in it where there is no compiler."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def nvcc_version(compiler: str) -> str:
    found = re.search(
        r"V(\d+\.\d+\.\d+)", subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    )
    return found[1] if found else "unknown"


def cuobjdump() -> str | None:
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        found = shutil.which("cuobjdump", path=str(Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
    return found


def compile_rows(dump: str, target: str) -> dict[str, Row]:
    """Kernel -> what ptxas says of it, its shared memory, and instructions of interest with how many there are."""
    rows: dict[str, Row] = {}
    for source in SOURCE_FILES:
        if target in source.targets:
            rows |= _rows_of(source, dump, target)
    return rows


def _rows_of(source: Source, dump: str, target: str) -> dict[str, Row]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        printed = compile_library(library, target, [SOURCES / source.file], ("-Xptxas=-v",))
        machine_code = subprocess.run([dump, "-sass", library], capture_output=True, text=True, check=True).stdout
        rows = _of_ptxas(source, printed)
        for function in machine_code.split("Function : ")[1:]:
            kernel = source.kernel.search(function.split("\n", 1)[0])
            if kernel is None:
                continue
            row = rows[source.name(kernel)]
            row["instructions"] = dict(sorted(Counter(source.instructions.findall(function)).items()))
            if source.shared is not None:
                row["shared"] = source.shared(ctypes.CDLL(str(library)), kernel)
        return rows


def _of_ptxas(source: Source, text: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for part in text.split("Compiling entry function")[1:]:
        numbers = [
            re.search(pattern, part)
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes stack frame",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
        ]
        registers, stack, spills, shared = (int(found[1]) if found else 0 for found in numbers)
        kernel = source.kernel.search(part)
        assert kernel is not None, part[:200]
        row: Row = {"registers": registers, "stack": stack, "spills": spills, "shared": shared}
        rows[source.name(kernel)] = row
    return rows


def broken_rules(rows: dict[str, Row]) -> list[str]:
    """What must hold of every row, whatever the compiler's version."""
    broken = []
    for name, row in sorted(rows.items()):
        instructions = row["instructions"]
        assert isinstance(instructions, dict)
        if row["spills"] or row["stack"]:
            broken.append(f"{name}: {row['spills']} B spilled, a stack of {row['stack']} B")
        collective = name.startswith(("all_reduce ", "exchange "))
        if not (collective or 0 < int(str(row["shared"]))) or int(str(row["shared"])) > SHARED_LIMIT:
            broken.append(f"{name}: {row['shared']} B of shared memory, at most {SHARED_LIMIT}")
        rules = _collective_rules if collective else _product_rules
        broken += [f"{name}: {text}" for text in rules(name, instructions)]
    return broken


def differences(recorded: dict[str, object], target: str, rows: dict[str, Row], version: str) -> list[str]:
    """Between the record and what was compiled now; registers are compared for the same compiler only."""
    wanted = recorded["rows"][target]  # type: ignore[index]
    if recorded["nvcc"] != version:
        return (
            [] if wanted.keys() == rows.keys() else [f"sm_{target}: kernels {sorted(rows)}, on record {sorted(wanted)}"]
        )
    return [
        f"sm_{target} {name}: {rows.get(name)}, on record {wanted.get(name)}"
        for name in sorted(wanted.keys() | rows.keys())
        if wanted.get(name) != rows.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    compiler, dump = find_nvcc(), cuobjdump()
    if compiler is None or dump is None:
        print("needs nvcc and cuobjdump on the PATH", file=sys.stderr)
        return 1
    version = nvcc_version(compiler)
    found = {target: compile_rows(dump, target) for target in TARGETS}
    problems = [f"sm_{target} {text}" for target, rows in found.items() for text in broken_rules(rows)]
    if update and not problems:
        content = {"nvcc": version, "sources": sources_digest(), "rows": found}
        FILE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    elif not update:
        recorded = json.loads(FILE.read_text())
        problems += [text for target, rows in found.items() for text in differences(recorded, target, rows, version)]
        if recorded["sources"] != sources_digest():
            problems.append("csrc/ is not what the record was made of; run record.py --update")
    for target, rows in found.items():
        for name, row in sorted(rows.items()):
            print(f"sm_{target} {name}: {row}")
    print("\n".join(problems) or "all rules hold")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
