"""What ranks that share out tokens send one another of their attention, and what they make of it, in one launch each.

A part is a row of values with the logarithm of its sum behind them, in fp32. Where the values have 16 bits, the row is
read and written through pointers of both types.

Reference: `PartMerge` in plain torch (`layers/attention/part_merge.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl


@triton.jit
def pack_parts_kernel(
    parts_ptr, lse_ptr, packed_ptr, packed_lse_ptr, num_tokens, num_heads, ranks, V_HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, LSE_WIDTH: tl.constexpr, LSE_AT: tl.constexpr, BLOCK_DV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [T, ranks * H, Dv] and lse [T, ranks * H] fp32 -> packed [ranks, T, H, WIDTH], and as fp32 [..., LSE_WIDTH]
    with the sum at LSE_AT. Grid: (T * ranks * H,)."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = row % num_heads
    token = row // (num_heads * ranks)
    rank = row // num_heads % ranks
    target = ((rank * num_tokens + token) * num_heads + head).to(tl.int64)
    cols = tl.arange(0, BLOCK_DV)
    mask = cols < V_HEAD_DIM
    values = tl.load(parts_ptr + row.to(tl.int64) * V_HEAD_DIM + cols, mask=mask)
    tl.store(packed_ptr + target * WIDTH + cols, values, mask=mask)
    tl.store(packed_lse_ptr + target * LSE_WIDTH + LSE_AT, tl.load(lse_ptr + row))


@triton.jit
def merge_parts_kernel(
    packed_ptr, packed_lse_ptr, sinks_ptr, o_ptr, num_rows, num_heads, ranks, stride_ot, stride_oh,
    V_HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LSE_WIDTH: tl.constexpr, LSE_AT: tl.constexpr,
    BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """packed [ranks, T, H, WIDTH] of this rank's heads -> o [T, H, Dv]; zeros where no rank has a token. num_rows: T *
    H. Grid: (T * H,)."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = row % num_heads
    cols = tl.arange(0, BLOCK_DV)
    mask = cols < V_HEAD_DIM
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head)
        total = 1.0
    for rank in range(ranks):
        part = (rank * num_rows + row).to(tl.int64)
        lse = tl.load(packed_lse_ptr + part * LSE_WIDTH + LSE_AT)
        values = tl.load(packed_ptr + part * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, lse)
        # No rank before this one may have had a token; -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp(top - base)
        weight = tl.exp(lse - base)
        acc = acc * decay + values * weight
        total = total * decay + weight
        top = new_top
    acc /= tl.where(total > 0.0, total, 1.0)
    target = o_ptr + (row // num_heads).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(target + cols, acc.to(o_ptr.dtype.element_ty), mask=mask)


def part_constants(v_head_dim: int, item: int, extra: int) -> dict[str, int]:
    """Of both kernels, with their warps. item: bytes of a value; extra: elements behind the values."""
    width = v_head_dim + extra
    return {
        "V_HEAD_DIM": v_head_dim,
        "WIDTH": width,
        "LSE_WIDTH": width * item // 4,
        "LSE_AT": v_head_dim * item // 4,
        "BLOCK_DV": triton.next_power_of_2(v_head_dim),
        "num_warps": 4,
    }


def pack_parts(parts: torch.Tensor, lse: torch.Tensor, ranks: int, extra: int) -> torch.Tensor:
    """parts [T, ranks * H, Dv], lse [T, ranks * H] fp32, both contiguous -> [ranks, T, H, Dv + extra]."""
    num_tokens, heads, dims = parts.shape
    packed = parts.new_empty((ranks, num_tokens, heads // ranks, dims + extra))
    pack_parts_kernel[(num_tokens * heads,)](
        parts, lse, packed, packed.view(torch.float32), num_tokens, heads // ranks, ranks,
        **part_constants(dims, parts.element_size(), extra), **pdl.options(),
    )  # fmt: skip
    return packed


def merge_parts(packed: torch.Tensor, out: torch.Tensor, extra: int, sinks: torch.Tensor | None = None) -> None:
    """packed [ranks, T, H, Dv + extra], as `pack_parts` makes it on each rank -> out [T, H, Dv]. sinks [H] fp32."""
    num_tokens, num_heads, dims = out.shape
    sums = packed.view(torch.float32)
    merge_parts_kernel[(num_tokens * num_heads,)](
        packed, sums, sums if sinks is None else sinks, out, num_tokens * num_heads, num_heads, len(packed),
        out.stride(0), out.stride(1), HAS_SINKS=sinks is not None,
        **part_constants(dims, packed.element_size(), extra), **pdl.options(),
    )  # fmt: skip
