"""Kernel that copies pages between the parts of a pool (one or two a layer) and rows of bytes in one launch.

A row holds a page: the bytes of each part, one after the other. Rows lie in a buffer on the device, or in main memory
that the device can address. A strip is a run of words of one part's page that a program copies at once.

Reference: `page_pool.copy_segments`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
"""Words that a program copies at once."""
WIDTHS = (64, 256, 1024)
"""Most words of a strip; a narrow one covers many rows at once where parts are narrow."""
PROGRAMS = 64
"""Programs of a launch. They keep half a megabyte in flight, four times what a bus of 64 GB/s holds, and leave most of
the GPU to the steps of requests."""
LAUNCH = {"num_warps": 4}


@triton.jit(
    do_not_specialize=["num_strips", "num_rows", "row_words"],
    do_not_specialize_on_alignment=["strips", "pages", "row_ids", "rows"],
)
def page_copy_kernel(
    strips, pages, row_ids, rows, num_strips, num_rows, row_words,
    TO_ROWS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """strips [S, 4] int64: address of the strip in page 0, words from one page to the next, its first word in a row,
    its words. pages, row_ids [N] int64; rows: words, row i from i * row_words on. Grid: any number of programs."""
    blocks = tl.cdiv(num_rows, ROWS)
    word = tl.arange(0, WORDS)[None, :]
    for tile in range(tl.program_id(0), num_strips * blocks, tl.num_programs(0)):
        strip = strips + tile % num_strips * 4
        address, stride, first, count = tl.load(strip), tl.load(strip + 1), tl.load(strip + 2), tl.load(strip + 3)
        part = address.to(tl.pointer_type(rows.dtype.element_ty))
        index = tile // num_strips * ROWS + tl.arange(0, ROWS)
        valid = index < num_rows
        page = tl.load(pages + index, mask=valid, other=0)
        row = tl.load(row_ids + index, mask=valid, other=0)
        of_part = part + page[:, None] * stride + word
        of_row = rows + row[:, None] * row_words + first + word
        mask = valid[:, None] & (word < count)
        if TO_ROWS:
            tl.store(of_row, tl.load(of_part, mask=mask), mask=mask)
        else:
            tl.store(of_part, tl.load(of_row, mask=mask), mask=mask)


def copy_rows(
    strips: torch.Tensor, width: int, pages: torch.Tensor, row_ids: torch.Tensor, rows: torch.Tensor, to_rows: bool
) -> None:
    """Copies pages to rows (`to_rows`) or back. strips [S, 4] int64 of at most `width` words, one of WIDTHS; pages,
    row_ids [N] int64; rows [R, W] of the integer type that is a word. All are on the device, except `rows`, which may
    be in main memory."""
    num_strips, num_rows = len(strips), len(pages)
    per_tile = TILE // width
    grid = (max(1, min(PROGRAMS, num_strips * triton.cdiv(num_rows, per_tile))),)
    page_copy_kernel[grid](
        *(strips, pages, row_ids, rows, num_strips, num_rows, rows.stride(0)),
        TO_ROWS=to_rows,
        ROWS=per_tile,
        WORDS=width,
        **LAUNCH,
    )
