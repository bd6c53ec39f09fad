"""The routed experts of one layer: gate and up projections, SiLU gate, down projection, weighted sum."""

from __future__ import annotations

import torch
import triton

from sglang.srt.layers.moe.fused_moe_triton import kernels
from sglang.srt.layers.moe.fused_moe_triton.align import align
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_DOWN, PAIR_GATE_UP, MoeTiles, few_pairs, tiles_for

COMBINE_BLOCK = 1024


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    tiles: MoeTiles | None = None,
) -> torch.Tensor:
    """x [T, H] (rows contiguous), w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I], topk_weights [T, k] fp32,
    topk_ids [T, k] int32 -> [T, H]. An id of -1 names no expert and adds nothing. `tiles` forces the grouped kernels.
    """
    num_pairs, num_experts = topk_ids.numel(), w13.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return out
    if tiles is None and few_pairs(num_pairs, num_experts):
        _pair_by_pair(x, w13, w2, topk_weights, topk_ids, out)
    else:
        _grouped(x, w13, w2, topk_weights, topk_ids, out, tiles or tiles_for(num_pairs, num_experts))
    return out


def _pair_by_pair(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_tokens, top_k = topk_ids.shape
    _, hidden, intermediate = w2.shape
    inter = torch.empty((num_tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(intermediate, PAIR_GATE_UP["BLOCK_N"]), num_tokens * top_k)
    kernels.gate_up_pairs_kernel[grid](
        x, w13, topk_ids, inter, top_k, hidden, intermediate, x.stride(0), w13.stride(0),
        EVEN_K=hidden % PAIR_GATE_UP["BLOCK_K"] == 0, **PAIR_GATE_UP,
    )  # fmt: skip
    grid = (triton.cdiv(hidden, PAIR_DOWN["BLOCK_N"]), num_tokens)
    kernels.down_sum_kernel[grid](
        inter, w2, topk_weights, topk_ids, out, hidden, intermediate, w2.stride(0),
        TOP_K=top_k, EVEN_K=intermediate % PAIR_DOWN["BLOCK_K"] == 0, **PAIR_DOWN,
    )  # fmt: skip


def _grouped(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    tiles: MoeTiles,
) -> None:
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, intermediate = w2.shape
    num_pairs = num_tokens * top_k
    up, down = tiles.gate_up, tiles.down
    assert up["BLOCK_M"] == down["BLOCK_M"], "both products share one grouping"
    blocks = align(topk_ids, num_experts, up["BLOCK_M"])
    grouping = (blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks)
    inter = torch.empty((num_pairs, intermediate), dtype=x.dtype, device=x.device)
    pair_out = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    kernels.gate_up_kernel[(blocks.max_blocks * triton.cdiv(intermediate, up["BLOCK_N"]),)](
        x, w13, inter, *grouping, num_pairs, top_k, hidden, intermediate, x.stride(0), w13.stride(0),
        EVEN_K=hidden % up["BLOCK_K"] == 0, **up,
    )  # fmt: skip
    kernels.down_kernel[(blocks.max_blocks * triton.cdiv(hidden, down["BLOCK_N"]),)](
        inter, w2, pair_out, *grouping, num_pairs, hidden, intermediate, w2.stride(0),
        EVEN_K=intermediate % down["BLOCK_K"] == 0, **down,
    )  # fmt: skip
    kernels.combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
        pair_out, topk_weights, topk_ids, out, hidden, TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4
    )
