"""Products of tokens with their experts' weights. Reference: `native_ops.fused_moe`.

w13 [E, 2I, H] holds the gate rows, then the up rows, of each expert; w2 [E, H, I]; both with contiguous last dim.
A pair is one (token, choice): number token * k + choice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu_gate(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _tile_at(pid, num_blocks, num_cols, GROUP_M: tl.constexpr):
    """(row block, column block) of a program: GROUP_M row blocks share each column of weights while it is in cache."""
    per_group = GROUP_M * num_cols
    first = (pid // per_group) * GROUP_M
    rows = tl.minimum(num_blocks - first, GROUP_M)
    return first + (pid % per_group) % rows, (pid % per_group) // rows


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x,  # [T, H]
    w13,  # [E, 2I, H]
    inter,  # [T * k, I]
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    top_k,
    hidden,
    intermediate,
    x_stride,
    expert_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """inter[pair] = silu(x[token] @ gate^T) * (x[token] @ up^T) for BLOCK_M pairs of one expert, BLOCK_N columns."""
    used = tl.load(num_blocks)
    pid = tl.program_id(0)
    if pid < used * tl.cdiv(intermediate, BLOCK_N):
        block, column = _tile_at(pid, used, tl.cdiv(intermediate, BLOCK_N), GROUP_M)
        expert = tl.load(block_expert + block).to(tl.int64)
        pairs = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        there = (pairs < num_pairs)[:, None]
        tokens = (pairs // top_k).to(tl.int64)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows past the end repeat an earlier one: their columns are not stored.
        rows = tl.where(cols < intermediate, cols, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        x_at = x + tokens[:, None] * x_stride + k[None, :]
        gate_at = w13 + expert * expert_stride + rows[None, :] * hidden + k[:, None]
        up_at = gate_at + intermediate.to(tl.int64) * hidden
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, hidden, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_at + start, mask=there, other=0.0)
                g = tl.load(gate_at + start)
                u = tl.load(up_at + start)
            else:
                inside = start + k < hidden
                a = tl.load(x_at + start, mask=there & inside[None, :], other=0.0)
                g = tl.load(gate_at + start, mask=inside[:, None], other=0.0)
                u = tl.load(up_at + start, mask=inside[:, None], other=0.0)
            gate = tl.dot(a, g, gate)
            up = tl.dot(a, u, up)
        dtype = inter.dtype.element_ty
        # Rounded where the separate steps would round.
        result = _silu_gate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)).to(dtype)
        out_at = inter + pairs.to(tl.int64)[:, None] * intermediate + cols[None, :]
        tl.store(out_at, result, mask=there & (cols < intermediate)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    inter,  # [T * k, I]
    w2,  # [E, H, I]
    out,  # [T * k, H]
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    hidden,
    intermediate,
    expert_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out[pair] = inter[pair] @ w2^T for BLOCK_M pairs of one expert, BLOCK_N columns."""
    used = tl.load(num_blocks)
    pid = tl.program_id(0)
    if pid < used * tl.cdiv(hidden, BLOCK_N):
        block, column = _tile_at(pid, used, tl.cdiv(hidden, BLOCK_N), GROUP_M)
        expert = tl.load(block_expert + block).to(tl.int64)
        pairs = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        there = (pairs < num_pairs)[:, None]
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.where(cols < hidden, cols, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        a_at = inter + pairs.to(tl.int64)[:, None] * intermediate + k[None, :]
        w_at = w2 + expert * expert_stride + rows[None, :] * intermediate + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, intermediate, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_at + start, mask=there, other=0.0)
                w = tl.load(w_at + start)
            else:
                inside = start + k < intermediate
                a = tl.load(a_at + start, mask=there & inside[None, :], other=0.0)
                w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
            total = tl.dot(a, w, total)
        out_at = out + pairs.to(tl.int64)[:, None] * hidden + cols[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=there & (cols < hidden)[None, :])


@triton.jit
def combine_kernel(
    pair_out,  # [T * k, H]
    topk_weights,  # [T, k] fp32
    topk_ids,  # [T, k] int32
    out,  # [T, H]
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = sum over the choices, in their order, of weight * pair_out. Choices of -1 were not computed."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        if tl.load(topk_ids + pair) >= 0:
            weight = tl.load(topk_weights + pair)
            total += weight * tl.load(pair_out + pair * hidden + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + cols, total.to(out.dtype.element_ty), mask=inside)


# Few pairs: each streams its expert's weights by itself, with no grouping. The rows of a product are spread over the
# threads along K, so that the weights are read in whole lines, and summed once at the end.


@triton.jit
def gate_up_pairs_kernel(
    x,  # [T, H]
    w13,  # [E, 2I, H]
    topk_ids,  # [T * k]
    inter,  # [T * k, I]
    top_k,
    hidden,
    intermediate,
    x_stride,
    expert_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Program (column block, pair)."""
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if expert >= 0:
        cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.where(cols < intermediate, cols, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        gate_at = w13 + expert * expert_stride + rows[:, None] * hidden + k[None, :]
        up_at = gate_at + intermediate.to(tl.int64) * hidden
        x_at = x + (pair // top_k) * x_stride + k
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, hidden, BLOCK_K):
            if EVEN_K:
                g = tl.load(gate_at + start)
                u = tl.load(up_at + start)
                a = tl.load(x_at + start)
            else:
                inside = start + k < hidden
                g = tl.load(gate_at + start, mask=inside[None, :], other=0.0)
                u = tl.load(up_at + start, mask=inside[None, :], other=0.0)
                a = tl.load(x_at + start, mask=inside, other=0.0)
            a = a.to(tl.float32)[None, :]
            gate += g.to(tl.float32) * a
            up += u.to(tl.float32) * a
        dtype = inter.dtype.element_ty
        gate_sum = tl.sum(gate, axis=1).to(dtype).to(tl.float32)
        up_sum = tl.sum(up, axis=1).to(dtype).to(tl.float32)
        result = _silu_gate(gate_sum, up_sum).to(dtype)
        tl.store(inter + pair * intermediate + cols, result, mask=cols < intermediate)


@triton.jit
def down_sum_kernel(
    inter,  # [T * k, I]
    w2,  # [E, H, I]
    topk_weights,  # [T, k] fp32
    topk_ids,  # [T, k] int32
    out,  # [T, H]
    hidden,
    intermediate,
    expert_stride,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Program (column block, token): the down projections of all choices and their weighted sum."""
    token = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < hidden, cols, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(topk_ids + pair).to(tl.int64)
        if expert >= 0:
            weight = tl.load(topk_weights + pair)
            w_at = w2 + expert * expert_stride + rows[:, None] * intermediate + k[None, :]
            a_at = inter + pair * intermediate + k
            for start in range(0, intermediate, BLOCK_K):
                if EVEN_K:
                    w = tl.load(w_at + start)
                    a = tl.load(a_at + start)
                else:
                    inside = start + k < intermediate
                    w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
                    a = tl.load(a_at + start, mask=inside, other=0.0)
                total += w.to(tl.float32) * (a.to(tl.float32) * weight)[None, :]
    tl.store(out + token * hidden + cols, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=cols < hidden)
