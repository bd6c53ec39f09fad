"""Weights asked for ahead of the wait of a dependent launch: into the L2 cache, which takes no registers and no shared
memory, and which no thread waits for.

Kernels that copy blocks to shared memory in a pipeline begin it behind the wait, for x is copied in it too. What was
asked for here is then a short way off, and the memory was busy meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BITS: tl.constexpr = tl.constexpr(8 * 128)
"""A line of the L2 cache."""


@triton.jit
def prefetch(w, rows, w_stride, size, COLUMNS: tl.constexpr):
    """Ask for the first COLUMNS elements, a power of two, of these rows [R] int64 of w, and no further than its `size`
    columns."""
    LINE: tl.constexpr = LINE_BITS // w.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = COLUMNS // LINE if COLUMNS > LINE else 1
    column = tl.minimum(tl.arange(0, LINES) * LINE, size - 1)
    at = (w + rows[:, None] * w_stride + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
