"""What the kernels of sgl-kernel cost on sm_120 and sm_121, on record in kernels.lock.json.

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nvcc_build import compile_library, find_nvcc

ROOT = Path(__file__).resolve().parent
FILE = ROOT / "kernels.lock.json"
TARGETS = ("120f", "121f")
"""One sm_120f cubin runs on both; sm_121's own code is looked at as well."""
SHARED_LIMIT = 101_376
PRODUCT = "QMMA.SF.16832.F32.E4M3.E2M1.E8"
SPREAD = "LDSM.U4x16P64TO8.M816.4"
_OF_INTEREST = re.compile(r"\b((?:QMMA|OMMA|HMMA|IMMA|LDSM)\.[A-Za-z0-9_.]+)")
_KERNEL = re.compile(r"mixed_moe_kernelINS_4TileILi(\d+)ELi(\d+)ELi\d+ELi\d+ELi(\d+)EEELb(\d)E")

Row = dict[str, object]


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
    """Kernel -> what ptxas says of it, its shared memory, and its matrix instructions with how many there are."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        printed = compile_library(library, target, options=("-Xptxas=-v",))
        machine_code = subprocess.run([dump, "-sass", library], capture_output=True, text=True, check=True).stdout
        shared = ctypes.CDLL(str(library)).sgl_mixed_moe_shared_bytes
        rows = {
            name: row | {"shared": shared(int(name.split()[1].split("x")[0]))}
            for name, row in _of_ptxas(printed).items()
        }
        for function in machine_code.split("Function : ")[1:]:
            if _KERNEL.search(function.split("\n", 1)[0]):
                counts = Counter(_OF_INTEREST.findall(function))
                rows[_name(function)]["instructions"] = dict(sorted(counts.items()))
    return rows


def _name(text: str) -> str:
    found = _KERNEL.search(text)
    assert found is not None, text[:200]
    m, n, stages, gated = found.groups()
    return f"{'gate_up' if gated == '1' else 'down'} {m}x{n}x128 {stages} stages"


def _of_ptxas(text: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for part in text.split("Compiling entry function")[1:]:
        numbers = [
            re.search(pattern, part)
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores")
        ]
        registers, stack, spills = (int(found[1]) if found else 0 for found in numbers)
        rows[_name(part)] = {"registers": registers, "stack": stack, "spills": spills}
    return rows


def broken_rules(rows: dict[str, Row]) -> list[str]:
    """What must hold of every row, whatever the compiler's version."""
    broken = []
    for name, row in sorted(rows.items()):
        instructions = row["instructions"]
        assert isinstance(instructions, dict)
        if row["spills"] or row["stack"]:
            broken.append(f"{name}: {row['spills']} B spilled, a stack of {row['stack']} B")
        if not 0 < int(str(row["shared"])) <= SHARED_LIMIT:
            broken.append(f"{name}: {row['shared']} B of shared memory, at most {SHARED_LIMIT}")
        if not instructions.get(PRODUCT) or not instructions.get(SPREAD):
            broken.append(f"{name}: lacks {PRODUCT} or {SPREAD}: {instructions}")
        others = [found for found in instructions if "MMA" in found and found != PRODUCT]
        if others:
            broken.append(f"{name}: multiplies with {', '.join(others)} as well")
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
