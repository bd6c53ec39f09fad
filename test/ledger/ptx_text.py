"""Small modules of PTX for tests, and their execution."""

from __future__ import annotations

import numpy as np
import torch

from sglang.ledger.ptx.launch import Executed, launch
from sglang.ledger.ptx.steps_alu import semantics
from sglang.ledger.ptx.types import UNSIGNED, Opcode

HEADER = """.version 8.7
.target sm_120a
.address_size 64
.file 1 "place/kernel.py"
"""


def module(body: str, parameters: int = 1, threads: int = 32, shared: int = 0) -> str:
    """A kernel `k` whose parameters are pointers, with registers of every kind."""
    names = ",\n".join(f"    .param .u64 .ptr .global .align 1 k_param_{i}" for i in range(parameters))
    array = f".shared .align 16 .b8 buffer[{shared}];\n" if shared else ""
    registers = ".reg .pred %p<9>;\n.reg .b16 %rs<19>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<19>;"
    return f"{HEADER}{array}.visible .entry k(\n{names}\n)\n.reqntid {threads}\n{{\n{registers}\n{body}\nret;\n}}\n"


def run(text: str, *tensors: torch.Tensor, grid: tuple[int, int, int] = (1, 1, 1)) -> Executed:
    return launch(text, grid, {f"array {i}": tensor for i, tensor in enumerate(tensors)})


def computed(opcode: str, *operands: object) -> object:
    """What an instruction gives for operands: integers (bits), or for predicates truth values."""
    found = semantics(Opcode(opcode))
    arrays = [
        np.array([bool(x)]) if bits == 1 else np.array([int(x) & (1 << bits) - 1], dtype=UNSIGNED[bits])  # type: ignore[call-overload]
        for x, bits in zip(operands, found.sources, strict=True)
    ]
    with np.errstate(all="ignore"):
        result = found.run(*arrays)
    assert result.dtype == (np.bool_ if found.results[0] == 1 else UNSIGNED[found.results[0]]), (opcode, result.dtype)
    return result[0].item()


def bits(x: float, kind: str = "f32") -> int:
    """The bits of a number."""
    if kind == "bf16":
        return bits(x) >> 16
    return int(
        np.array([x], {"f32": np.float32, "f16": np.float16, "f64": np.float64}[kind]).view(f"u{int(kind[1:]) // 8}")[0]
    )
