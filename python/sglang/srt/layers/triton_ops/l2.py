"""Bytes that are asked for before they are needed: from memory into the L2, without waiting and without registers."""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BYTES: tl.constexpr = tl.constexpr(128)
LINES: tl.constexpr = tl.constexpr(32)
"""Of a row, that a program asks for at once."""


@triton.jit
def to_l2(pointers, wanted):
    """Ask for the lines of 128 bytes that `pointers` lie in, where `wanted`. Nothing is read, so that it does not
    matter what another kernel is writing meanwhile."""
    addresses, flags = tl.broadcast(pointers.to(tl.int64), wanted.to(tl.int32))
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [addresses, flags],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
