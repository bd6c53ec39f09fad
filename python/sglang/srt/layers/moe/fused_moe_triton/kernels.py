"""Products of tokens with their experts' weights, tokens of one expert together. Reference: `native_ops.fused_moe`.

w13 [E, 2I, H] holds the gate rows, then the up rows, of each expert, or [E, I, H] the up rows alone (HAS_GATE False);
w2 [E, H, I]; see ExpertWeights for how they are stored. A pair is one (token, choice): number token * k + choice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.activation import activated
from sglang.srt.layers.triton_ops.scaled_dot import multiply


@triton.jit
def _tile_at(pid, num_blocks, num_cols, GROUP_M: tl.constexpr):
    """(row block, column block) of a program: GROUP_M row blocks share each column of weights while it is in cache."""
    per_group = GROUP_M * num_cols
    first = (pid // per_group) * GROUP_M
    rows = tl.minimum(num_blocks - first, GROUP_M)
    return first + (pid % per_group) % rows, (pid % per_group) // rows


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,  # [T, H] as the product takes it
    x_scale,
    w13,  # [E, 2I, H]
    w_scale,
    w_factor,  # HAS_FACTOR: [E] fp32 global scales
    x_factor,  # X_FACTOR: [1] fp32
    bias,  # HAS_BIAS: [E, 2I]
    inter,  # [T * k, I]
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    top_k,
    hidden,
    intermediate,
    x_stride,
    xs_stride,
    w_stride,
    ws_stride,
    w_expert_stride,
    ws_expert_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    X_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """inter[pair] = activated(x[token] @ gate^T, x[token] @ up^T) for BLOCK_M pairs of one expert, BLOCK_N columns.
    Without a gate the only product takes its place."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    used = tl.load(num_blocks)
    pid = tl.program_id(0)
    if pid < used * tl.cdiv(intermediate, BLOCK_N):
        block, column = _tile_at(pid, used, tl.cdiv(intermediate, BLOCK_N), GROUP_M)
        expert = tl.load(block_expert + block).to(tl.int64)
        pairs = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        there = pairs < num_pairs
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows past the end repeat the tile's first: their columns are not stored.
        rows = tl.where(cols < intermediate, cols, column * BLOCK_N).to(tl.int64)
        gate, up = multiply(
            x, x_scale, (pairs // top_k).to(tl.int64), there, x_stride, xs_stride,
            w13 + expert * w_expert_stride, w_scale + expert * ws_expert_stride, rows, w_stride, ws_stride,
            intermediate.to(tl.int64), hidden,
            HAS_GATE, KIND, ELEMENT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, ONE_SCALE,
        )  # fmt: skip
        if SWAP:
            gate, up = tl.trans(gate), tl.trans(up)
        if HAS_FACTOR:
            factor = tl.load(w_factor + expert)
            if X_FACTOR:
                factor *= tl.load(x_factor)
            gate, up = gate * factor, up * factor
        if HAS_BIAS:
            bias_at = bias + expert * (intermediate + HAS_GATE * intermediate) + rows
            gate += tl.load(bias_at)[None, :].to(tl.float32)
            if HAS_GATE:
                up += tl.load(bias_at + intermediate)[None, :].to(tl.float32)
        dtype = inter.dtype.element_ty
        # Rounded where the separate steps would round.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = activated(gate, up, ALPHA, CUBIC, OFFSET, LIMIT, HAS_GATE).to(dtype)
        out_at = inter + pairs.to(tl.int64)[:, None] * intermediate + cols[None, :]
        tl.store(out_at, result, mask=there[:, None] & (cols < intermediate)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    inter,  # [T * k, I] as the product takes it
    x_scale,
    w2,  # [E, H, I]
    w_scale,
    w_factor,  # HAS_FACTOR: [E] fp32 global scales
    x_factor,  # X_FACTOR: [1] fp32
    bias,  # HAS_BIAS: [E, H]
    out,  # [T * k, H]
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    hidden,
    intermediate,
    x_stride,
    xs_stride,
    w_stride,
    ws_stride,
    w_expert_stride,
    ws_expert_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    X_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = inter[pair] @ w2^T for BLOCK_M pairs of one expert, BLOCK_N columns."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    used = tl.load(num_blocks)
    pid = tl.program_id(0)
    if pid < used * tl.cdiv(hidden, BLOCK_N):
        block, column = _tile_at(pid, used, tl.cdiv(hidden, BLOCK_N), GROUP_M)
        expert = tl.load(block_expert + block).to(tl.int64)
        pairs = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        there = pairs < num_pairs
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.where(cols < hidden, cols, column * BLOCK_N).to(tl.int64)
        total, _ = multiply(
            inter, x_scale, pairs.to(tl.int64), there, x_stride, xs_stride,
            w2 + expert * w_expert_stride, w_scale + expert * ws_expert_stride, rows, w_stride, ws_stride,
            0, intermediate,
            False, KIND, ELEMENT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, ONE_SCALE,
        )  # fmt: skip
        if SWAP:
            total = tl.trans(total)
        if HAS_FACTOR:
            factor = tl.load(w_factor + expert)
            if X_FACTOR:
                factor *= tl.load(x_factor)
            total *= factor
        if HAS_BIAS:
            total += tl.load(bias + expert * hidden + rows)[None, :].to(tl.float32)
        out_at = out + pairs.to(tl.int64)[:, None] * hidden + cols[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=there[:, None] & (cols < hidden)[None, :])


@triton.jit
def combine_kernel(
    pair_out,  # [T * k, N]
    topk_weights,  # [T, k] fp32
    topk_ids,  # [T, k] int32
    out,  # [T, N]
    num_cols,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = sum over the choices, in their order, of weight * pair_out. Choices of -1 were not computed."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    total = tl.zeros((BLOCK,), tl.float32)
    # Masks and not branches: the loads of all choices are then on their way at once.
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        chosen = tl.load(topk_ids + pair) >= 0
        value = tl.load(pair_out + pair * num_cols + cols, mask=inside & chosen, other=0.0).to(tl.float32)
        total += tl.load(topk_weights + pair) * value
    tl.store(out + token * num_cols + cols, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_normed_kernel(
    pair_out,  # [T * k, N]
    topk_weights,  # [T, k] fp32
    topk_ids,  # [T, k] int32
    norm_weight,  # [N] fp32
    out,  # [T, N]
    num_cols,
    eps,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """As combine_kernel, of the norms of pair_out * norm_weight. Program: one token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_cols
    scale = tl.load(norm_weight + cols, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        chosen = tl.load(topk_ids + pair) >= 0
        value = tl.load(pair_out + pair * num_cols + cols, mask=inside & chosen, other=0.0).to(tl.float32)
        # Rounded as the output of a layer would be.
        value = (value * scale).to(out.dtype.element_ty).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value) / num_cols + eps)
        total += tl.load(topk_weights + pair) * inverse * value
    tl.store(out + token * num_cols + cols, total.to(out.dtype.element_ty), mask=inside)
