"""The experts' products for few pairs: each pair streams its expert's weights by itself, with no grouping. Reference:
`native_ops.fused_moe` with dequantized weights. The tiles of weights are those of `streamed_dot`."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.activation import activated
from sglang.srt.layers.triton_ops.streamed_dot import add_loaded, add_product, load_columns, load_weights, sum_rows


@triton.jit
def gate_up_pairs_kernel(
    x,  # [T, H]
    w13,  # [E, 2I, H]
    w_scale,
    w_factor,  # HAS_FACTOR: [E] fp32 global scales
    bias,  # HAS_BIAS: [E, 2I]
    topk_ids,  # [T * k]
    inter,  # [T * k, I]
    top_k,
    hidden,
    intermediate,
    x_stride,
    w_stride,
    ws_stride,
    w_expert_stride,
    ws_expert_stride,
    BLOCK_N: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (column block, pair). Without a gate the only product takes its place."""
    if PDL:
        # In this order: `down_sum_kernel`, which may begin then, reads the choices without waiting itself.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if expert >= 0:
        there = expert >= 0
        first = tl.program_id(0) * BLOCK_N
        cols = first + tl.arange(0, BLOCK_N)
        rows = tl.where(cols < intermediate, cols, first).to(tl.int64)
        up_rows = rows + intermediate
        x += (pair // top_k) * x_stride
        w = w13 + expert * w_expert_stride
        scales = w_scale + expert * ws_expert_stride
        gate = tl.zeros((BLOCK_N, C, W), tl.float32)
        up = tl.zeros((BLOCK_N, C, W), tl.float32)
        # Unrolled, so that the weights of several steps are on their way at once.
        for start in tl.range(0, hidden, COLS, loop_unroll_factor=UNROLL):
            gate = add_product(
                gate, x, 1.0, there, w, scales, rows, first, w_stride, ws_stride, hidden, start,
                KIND, ELEMENT, GROUP, PACKED, C, W, EVEN_K,
            )  # fmt: skip
            if HAS_GATE:
                up = add_product(
                    up, x, 1.0, there, w, scales, up_rows, first + intermediate, w_stride, ws_stride, hidden, start,
                    KIND, ELEMENT, GROUP, PACKED, C, W, EVEN_K,
                )  # fmt: skip
        gate_sum, up_sum = sum_rows(gate), sum_rows(up)
        if KIND == "scaled":
            gate_sum *= tl.load(scales + rows * ws_stride)
            if HAS_GATE:
                up_sum *= tl.load(scales + up_rows * ws_stride)
        if HAS_FACTOR:
            factor = tl.load(w_factor + expert)
            gate_sum, up_sum = gate_sum * factor, up_sum * factor
        if HAS_BIAS:
            bias_at = bias + expert * (intermediate + HAS_GATE * intermediate)
            gate_sum += tl.load(bias_at + rows).to(tl.float32)
            if HAS_GATE:
                up_sum += tl.load(bias_at + up_rows).to(tl.float32)
        dtype = inter.dtype.element_ty
        gate_sum, up_sum = gate_sum.to(dtype).to(tl.float32), up_sum.to(dtype).to(tl.float32)
        result = activated(gate_sum, up_sum, ALPHA, CUBIC, OFFSET, LIMIT, HAS_GATE).to(dtype)
        tl.store(inter + pair * intermediate + cols, result, mask=cols < intermediate)


@triton.jit
def _down_weights(
    w2, w_scale, bias, expert, rows, first, hidden, intermediate, w_stride, ws_stride,
    w_expert_stride, ws_expert_stride, step, KIND: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Load an expert's weights for one step of `down_sum_kernel`: a tile and, once, the bias of its rows."""
    there = expert >= 0
    expert = tl.maximum(expert, 0)
    scales = w_scale + expert * ws_expert_stride
    loaded = load_weights(
        there, w2 + expert * w_expert_stride, scales, rows, first, w_stride, ws_stride, intermediate, step * COLS,
        KIND, GROUP, C, W, EVEN_K,
    )  # fmt: skip
    row_bias = rows
    if HAS_BIAS:
        row_bias = tl.load(bias + expert * hidden + rows, mask=there & (step == 0), other=0.0)
    return loaded, row_bias


@triton.jit
def down_sum_kernel(
    inter,  # [T * k, I]
    w2,  # [E, H, I]
    w_scale,
    w_factor,  # HAS_FACTOR: [E] fp32 global scales
    bias,  # HAS_BIAS: [E, H]
    topk_weights,  # [T, k] fp32
    topk_ids,  # [T, k] int32
    out,  # [T, H]
    hidden,
    intermediate,
    w_stride,
    ws_stride,
    w_expert_stride,
    ws_expert_stride,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,  # tiles whose weights are loaded before the kernel waits for `inter`
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (column block, token): the down projections of all choices and their weighted sum. STEPS tiles cover I.

    Choices of -1 are masked and not branched over, so that the weights of several choices are on their way at once.
    The choices are read before the wait, which no other activation may be: the kernel ahead is `gate_up_pairs_kernel`,
    and it lets this one begin only when it has waited for whoever wrote them.
    """
    tl.static_assert(EARLY == 0 or KIND != "scaled", "a row's scales differ from expert to expert")
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < hidden, cols, first).to(tl.int64)
    experts = ()  # type: tuple[tl.tensor, ...]
    for choice in tl.static_range((EARLY + STEPS - 1) // STEPS):
        # Past the SM's own cache, which may have what an earlier step wrote there.
        experts = experts + (tl.load(topk_ids + token * TOP_K + choice, cache_modifier=".cg").to(tl.int64),)
    weights = ()  # type: tuple[tl.tensor, ...]
    for index in tl.static_range(EARLY):
        weights = weights + (
            _down_weights(
                w2, w_scale, bias, experts[index // STEPS], rows, first, hidden, intermediate, w_stride, ws_stride,
                w_expert_stride, ws_expert_stride, index % STEPS, KIND, GROUP, COLS, C, W, EVEN_K, HAS_BIAS,
            ),
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    columns = ()  # type: tuple[tl.tensor, ...]
    for index in tl.static_range(EARLY):
        row, there = inter + (token * TOP_K + index // STEPS) * intermediate, experts[index // STEPS] >= 0
        columns = columns + (load_columns(row, there, intermediate, (index % STEPS) * COLS, C, W, EVEN_K),)
    total = tl.zeros((BLOCK_N, C, W), tl.float32)
    biases = tl.zeros((BLOCK_N,), tl.float32)
    for index in tl.static_range(EARLY):
        pair = token * TOP_K + index // STEPS
        expert = experts[index // STEPS]
        loaded, row_bias = weights[index]
        weight = tl.load(topk_weights + pair)
        factor = weight
        if HAS_FACTOR:
            factor *= tl.load(w_factor + tl.maximum(expert, 0))
        total += add_loaded(tl.zeros((BLOCK_N, C, W), tl.float32), loaded, columns[index], factor, KIND)
        if HAS_BIAS:
            biases += weight * row_bias.to(tl.float32)
    for index in tl.range(EARLY, TOP_K * STEPS, loop_unroll_factor=UNROLL):
        pair = token * TOP_K + index // STEPS
        expert = tl.load(topk_ids + pair).to(tl.int64)
        there = expert >= 0
        expert = tl.maximum(expert, 0)
        weight = tl.load(topk_weights + pair)
        factor = weight
        if HAS_FACTOR:
            factor *= tl.load(w_factor + expert)
        scales = w_scale + expert * ws_expert_stride
        part = add_product(
            tl.zeros((BLOCK_N, C, W), tl.float32), inter + pair * intermediate, factor, there,
            w2 + expert * w_expert_stride, scales, rows, first, w_stride, ws_stride, intermediate,
            (index % STEPS) * COLS, KIND, ELEMENT, GROUP, PACKED, C, W, EVEN_K,
        )  # fmt: skip
        if KIND == "scaled":
            # A row's scales differ from expert to expert.
            part *= tl.load(scales + rows * ws_stride)[:, None, None]
        total += part
        if HAS_BIAS:
            own = tl.load(bias + expert * hidden + rows, mask=there & (index % STEPS == 0), other=0.0)
            biases += weight * own.to(tl.float32)
    sums = sum_rows(total) + biases
    tl.store(out + token * hidden + cols, sums.to(out.dtype.element_ty), mask=cols < hidden)
