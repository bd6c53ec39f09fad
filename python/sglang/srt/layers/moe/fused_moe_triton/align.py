"""Groups (token, expert) pairs by expert, in blocks of BLOCK_M rows, on the device and without synchronization.

Output: `sorted_pairs`, the pair numbers `token * k + choice` expert by expert, each expert's run padded to a multiple
of BLOCK_M with the number of pairs; `block_expert`, the expert of each block; `num_blocks`, the number of used blocks,
after which nothing may be read. The order within an expert varies; no result depends on it, because each pair's row is
computed independently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

ONE_PROGRAM_PAIRS = 4096
"""Up to this number of pairs a single program does everything in one launch."""
CHUNK = 1024


@dataclass(slots=True)
class ExpertBlocks:
    """Pairs grouped by expert, in blocks."""

    sorted_pairs: torch.Tensor  # [max_blocks * BLOCK_M] int32
    block_expert: torch.Tensor  # [max_blocks] int32
    num_blocks: torch.Tensor  # [1] int32

    @property
    def max_blocks(self) -> int:
        """Returns an upper bound of `num_blocks`."""
        return self.block_expert.shape[0]


@triton.jit
def _count_pairs(topk_ids, start, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Pairs of each expert in one chunk; ids of -1 are left out."""
    at = start + tl.arange(0, CHUNK)
    ids = tl.load(topk_ids + at, mask=at < num_pairs, other=-1)
    return tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=ids >= 0)


@triton.jit
def _scatter_pairs(topk_ids, start, num_pairs, cursors, sorted_pairs, CHUNK: tl.constexpr):
    at = start + tl.arange(0, CHUNK)
    ids = tl.load(topk_ids + at, mask=at < num_pairs, other=-1)
    valid = ids >= 0
    place = tl.atomic_add(cursors + tl.maximum(ids, 0), 1, mask=valid, sem="relaxed")
    tl.store(sorted_pairs + place, at, mask=valid)


@triton.jit
def _write_block_experts(ends, block_expert, used, EXPERTS: tl.constexpr):
    """ends [EXPERTS]: first block after each expert's run. Block b belongs to the first expert with ends > b."""
    for block in range(0, used, 16):
        b = block + tl.arange(0, 16)
        expert = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), axis=1)
        tl.store(block_expert + b, tl.minimum(expert, EXPERTS - 1), mask=b < used)


@triton.jit(do_not_specialize=["num_pairs"])
def align_small_kernel(
    topk_ids,  # [num_pairs] int32
    sorted_pairs,
    block_expert,
    num_blocks,
    cursors,  # [EXPERTS] int32 scratch
    num_pairs,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Everything in one program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        counts += _count_pairs(topk_ids, start, num_pairs, EXPERTS, CHUNK)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    tl.store(cursors + tl.arange(0, EXPERTS), (ends - blocks) * BLOCK_M)
    used = tl.sum(blocks)
    tl.store(num_blocks, used)
    for start in range(0, used * BLOCK_M, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(sorted_pairs + at, num_pairs + tl.zeros((CHUNK,), tl.int32), mask=at < used * BLOCK_M)
    _write_block_experts(ends, block_expert, used, EXPERTS)
    # The cursors and the padding must be in memory before pairs are placed over them.
    tl.debug_barrier()
    for start in range(0, num_pairs, CHUNK):
        _scatter_pairs(topk_ids, start, num_pairs, cursors, sorted_pairs, CHUNK)


@triton.jit(do_not_specialize=["num_pairs", "num_places"])
def align_count_kernel(
    topk_ids,
    counts,  # [EXPERTS] int32, zero
    sorted_pairs,
    num_pairs,
    num_places,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """First of three for many pairs: count, and fill the places with padding."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    counted = _count_pairs(topk_ids, pid * CHUNK, num_pairs, EXPERTS, CHUNK)
    tl.atomic_add(counts + tl.arange(0, EXPERTS), counted, mask=counted > 0, sem="relaxed")
    for start in range(pid * CHUNK, num_places, tl.num_programs(0) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(sorted_pairs + at, num_pairs + tl.zeros((CHUNK,), tl.int32), mask=at < num_places)


@triton.jit
def align_offsets_kernel(
    counts,
    cursors,
    block_expert,
    num_blocks,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second: where each expert's run starts."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts + expert) + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    tl.store(cursors + expert, (ends - blocks) * BLOCK_M)
    used = tl.sum(blocks)
    tl.store(num_blocks, used)
    _write_block_experts(ends, block_expert, used, EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def align_scatter_kernel(topk_ids, cursors, sorted_pairs, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Third: place the pairs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _scatter_pairs(topk_ids, tl.program_id(0) * CHUNK, num_pairs, cursors, sorted_pairs, CHUNK)


def align(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """Groups the pairs of topk_ids [T, k] int32 (contiguous, -1 for none) in blocks of `block_m` rows."""
    num_pairs = topk_ids.numel()
    # Each used expert, at most min(pairs, experts) of them, wastes at most BLOCK_M - 1 places.
    max_blocks = triton.cdiv(num_pairs + min(num_pairs, num_experts) * (block_m - 1), block_m)
    experts = triton.next_power_of_2(num_experts)
    device = topk_ids.device
    # Each begins at a multiple of 16 bytes, whatever the sizes: otherwise Triton would compile every kernel twice.
    scratch = torch.empty(4 + max_blocks * (block_m + 1), dtype=torch.int32, device=device)
    num_blocks, _, sorted_pairs, block_expert = scratch.split([1, 3, max_blocks * block_m, max_blocks])
    if num_pairs <= ONE_PROGRAM_PAIRS:
        cursors = torch.empty(experts, dtype=torch.int32, device=device)
        align_small_kernel[(1,)](
            topk_ids, sorted_pairs, block_expert, num_blocks, cursors, num_pairs,
            EXPERTS=experts, BLOCK_M=block_m, CHUNK=CHUNK, num_warps=16, **pdl.options(),
        )  # fmt: skip
    else:
        counts, cursors = torch.zeros((2, max(4, experts)), dtype=torch.int32, device=device)  # 16 bytes and more
        grid = (triton.cdiv(num_pairs, CHUNK),)
        align_count_kernel[grid](
            topk_ids, counts, sorted_pairs, num_pairs, max_blocks * block_m,
            EXPERTS=experts, CHUNK=CHUNK, num_warps=8, **pdl.options(),
        )  # fmt: skip
        align_offsets_kernel[(1,)](
            counts, cursors, block_expert, num_blocks,
            EXPERTS=experts, BLOCK_M=block_m, num_warps=8, **pdl.options(),
        )  # fmt: skip
        align_scatter_kernel[grid](
            topk_ids, cursors, sorted_pairs, num_pairs, CHUNK=CHUNK, num_warps=8, **pdl.options()
        )
    return ExpertBlocks(sorted_pairs, block_expert, num_blocks)
