"""Where products of experts find weights whose rows are not the experts' numbers (`ExpertWeights.row_of_expert`).

Each kernel waits for the one ahead of it, and so do those behind, so that what was copied before is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

CHUNK = 1024


@triton.jit(do_not_specialize=["num_pairs"])
def look_up_kernel(ids, table, out, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    some = tl.load(ids + at, mask=at < num_pairs, other=-1)
    row = tl.load(table + tl.maximum(some, 0), mask=some >= 0, other=-1)
    tl.store(out + at, row, mask=at < num_pairs)


@triton.jit(do_not_specialize_on_alignment=["block_expert", "num_blocks"])
def place_blocks_kernel(block_expert, num_blocks, table, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    used = at < tl.load(num_blocks)
    expert = tl.load(block_expert + at, mask=used, other=0)
    tl.store(block_expert + at, tl.load(table + expert, mask=used, other=0), mask=used)


def look_up(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns table[ids] for ids [T, k] int32 (contiguous), -1 where they are -1."""
    out = torch.empty_like(ids)
    if ids.numel():
        look_up_kernel[(triton.cdiv(ids.numel(), CHUNK),)](ids, table, out, ids.numel(), CHUNK=CHUNK, **pdl.options())
    return out


def place_blocks(block_expert: torch.Tensor, num_blocks: torch.Tensor, table: torch.Tensor) -> None:
    """Replaces the experts of the first `num_blocks` [1] blocks by their rows in the table."""
    grid = (triton.cdiv(len(block_expert), CHUNK),)
    place_blocks_kernel[grid](block_expert, num_blocks, table, CHUNK=CHUNK, **pdl.options())
