"""The compiled library, with the types of its C interface (csrc/mixed_moe.cu)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

FILE = Path(__file__).with_name("libsm120_sgl_kernel.so")

MIXED_BLOCK_M = (64, 128)
"""Rows of the blocks that pairs may be grouped in."""


class MixedArguments(ctypes.Structure):
    """As in csrc/mixed_moe.cuh, which says what they mean. Addresses are of device memory; `bias` 0 is none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "w", "w_scale", "bias", "out")),
        *((name, ctypes.c_void_p) for name in ("sorted_pairs", "block_expert", "num_blocks")),
        *((name, ctypes.c_int64) for name in ("x_stride", "xs_stride", "w_stride", "ws_stride")),
        *((name, ctypes.c_int64) for name in ("w_expert_stride", "ws_expert_stride")),
        *((name, ctypes.c_int32) for name in ("num_pairs", "pairs_per_row", "columns", "depth", "group_m", "is_half")),
        *((name, ctypes.c_float) for name in ("alpha", "offset", "limit")),
    )


class Library:
    """The library in one file. Raises OSError if it cannot be loaded, RuntimeError if it has another interface."""

    MixedArguments = MixedArguments

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file))
        self._library.sgl_error_string.restype = ctypes.c_char_p
        size = self._library.sgl_mixed_moe_arguments_size()
        if size != ctypes.sizeof(MixedArguments):
            raise RuntimeError(f"{file} is not of this version of sm120-sgl-kernel; install it again")

    def mixed_moe_gate_up(self, args: MixedArguments, block_m: int, max_blocks: int, stream: int) -> None:
        """out [pairs, columns] = gated(x @ gate^T, x @ up^T), w [E, 2 * columns, depth]. Raises RuntimeError."""
        self._run(self._library.sgl_mixed_moe_gate_up, args, block_m, max_blocks, stream)

    def mixed_moe_down(self, args: MixedArguments, block_m: int, max_blocks: int, stream: int) -> None:
        """out [pairs, columns] = x @ w^T, w [E, columns, depth]. Raises RuntimeError."""
        self._run(self._library.sgl_mixed_moe_down, args, block_m, max_blocks, stream)

    def _run(self, function, args: MixedArguments, block_m: int, max_blocks: int, stream: int) -> None:
        code = function(ctypes.byref(args), block_m, max_blocks, ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"{function.__name__}: {self._library.sgl_error_string(code).decode()}")


@functools.cache
def installed() -> Library:
    """What was compiled when this package was installed."""
    return Library(FILE)
