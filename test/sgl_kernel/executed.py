"""The CUDA kernels as nvcc compiles them for SM120, their PTX executed on the CPU: in the place of the library."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import ModuleType

from sglang.ledger.ptx.launch import launch
from sglang.ledger.ptx.record import note_other

_ENTRY = re.compile(r"^\.(?:visible\s+\.)?entry\s+([\w$]+)", re.MULTILINE)
_TILE = re.compile(r"TileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)EEELb([01])")


def compiled(source: Path, nvcc: str, to: Path) -> str:
    """The PTX of one file of csrc/."""
    command = [nvcc, "-ptx", "-arch=sm_120a", "-std=c++17", "-O3", str(source), "-o", str(to)]
    subprocess.run(command, check=True, capture_output=True)
    return to.read_text()


def kernels(ptx: str) -> dict[str, str]:
    """By its name, each kernel of a module as a module of its own."""
    starts = list(_ENTRY.finditer(ptx))
    ends = [match.start() for match in starts[1:]] + [len(ptx)]
    return {
        match[1]: ptx[: starts[0].start()] + ptx[match.start() : end] for match, end in zip(starts, ends, strict=True)
    }


class ExecutedMixedMoe:
    """What `library.Library` offers, executed."""

    def __init__(self, library: ModuleType, ptx: str) -> None:
        self.MixedArguments = library.MixedArguments
        self._kernels = {}
        for name, text in kernels(ptx).items():
            tile = _TILE.search(name)
            assert tile is not None, name
            m, n, warps_m, warps_n, stages, gated = map(int, tile.groups())
            shared = stages * (128 * (m + n) + 4 * (m + n))
            self._kernels[m, bool(gated)] = text, n // 2 if gated else n, 32 * warps_m * warps_n, shared

    def mixed_moe_gate_up(self, args: ctypes.Structure, block_m: int, max_blocks: int, stream: int) -> None:
        self._run(args, block_m, max_blocks, True)

    def mixed_moe_down(self, args: ctypes.Structure, block_m: int, max_blocks: int, stream: int) -> None:
        self._run(args, block_m, max_blocks, False)

    def _run(self, args: ctypes.Structure, block_m: int, max_blocks: int, gated: bool) -> None:
        """As `launch` of csrc/mixed_moe.cu."""
        text, columns, threads, shared = self._kernels[block_m, gated]
        blocks = max_blocks * -(-args.columns // columns)
        if blocks:
            done = launch(text, (blocks, 1, 1), {"args": args}, shared, threads)
            note_other(f"sgl-kernel mixed_moe_kernel {block_m} {'gate_up' if gated else 'down'}", blocks, done)
