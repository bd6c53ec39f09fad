"""Instructions of compiled kernels, from their machine code. Triton brings assembler and disassembler; no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MATRIX = ("HMMA", "QMMA", "OMMA", "HGMMA", "QGMMA")


@dataclass(frozen=True, slots=True, order=True)
class Loop:
    """Of one round: matrix instructions and others."""

    matrix: int
    others: int


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def disassemble(ptx: str) -> str:
    tools = _tools()
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    assembler = "ptxas" if target[1].startswith(("sm_8", "sm_9")) else "ptxas-blackwell"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "tile.ptx"), Path(folder, "tile.cubin")
        source.write_text(ptx)
        command = [tools / assembler, "-arch", target[1], source, "-o", cubin]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return _text(cubin)


def functions_of(source: Path, target: str, includes: Path) -> dict[str, str]:
    """The machine code of the kernels of a CUDA source, by symbol; `target` as nvcc names it ("sm_120f")."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        options = ["-std=c++17", "-O3", f"-I{includes}", f"-arch={target}", "--cubin", "-o", str(cubin)]
        subprocess.run(["nvcc", *options, str(source)], check=True)
        parts = re.split(r"^\.text\.(\w+):", _text(cubin), flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))


def _text(cubin: Path) -> str:
    command = [_tools() / "nvdisasm", "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(text: str) -> list[Loop]:
    """Everything between a label and a branch back to it."""
    labels: dict[str, int] = {}
    names: list[str] = []
    found = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z][A-Z0-9_]*)([^;]*);", line):
            names.append(instruction[1])
            target = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1] == "BRA" and target and target[0] in labels:
                body = names[labels[target[0]] :]
                matrix = sum(name in MATRIX for name in body)
                found.append(Loop(matrix, sum(name != "NOP" for name in body) - matrix))
    return found
