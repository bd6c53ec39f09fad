"""The kernels of `linear_products`, y = x @ w^T (+ bias) with a quantized weight: by tiles, and for few rows.
Reference: `LinearWeight.dequantized` and `reference.round_activation`."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.scaled_dot import multiply
from sglang.srt.layers.triton_ops.streamed_dot import add_loaded, add_product, load_columns, load_weights, sum_rows


@triton.jit(do_not_specialize=["T"])
def tiles_kernel(
    x,  # [T, K] as the product takes it
    x_scale,
    w,  # [N, K]
    w_scale,
    w_factor,  # HAS_FACTOR: [N] fp32
    x_factor,  # HAS_X_FACTOR: [1] fp32
    bias,  # HAS_BIAS: [N]
    out,  # [T, N]
    parts,  # SPLITS > 1: [SPLITS, T, N] fp32 scratch
    arrivals,  # SPLITS > 1: [tiles] int32, zero before and after
    T,
    N,
    K,
    chunk,  # columns of a split, a multiple of BLOCK_K and of 128
    x_stride,
    xs_stride,
    w_stride,
    ws_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_X_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, split). GROUP_M row blocks share each column of weights while it is in cache."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    split = tl.program_id(1)
    num_blocks = tl.cdiv(T, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = (pid // per_group) * GROUP_M
    in_group = tl.minimum(num_blocks - first, GROUP_M)
    row = (first + (pid % per_group) % in_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (pid % per_group) // in_group * BLOCK_N
    cols = column + tl.arange(0, BLOCK_N)
    there = row < T
    x_rows = tl.where(there, row, 0).to(tl.int64)
    # Rows of w past the end repeat the tile's first: their columns are not stored.
    w_rows = tl.where(cols < N, cols, column).to(tl.int64)
    begin = split * chunk
    if KIND == "mx":
        X_PER: tl.constexpr = 2 if GROUP == 16 else 1
        W_PER: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
        x += begin // X_PER
        x_scale += begin // GROUP
        w += begin // W_PER
        w_scale += begin // GROUP
    elif KIND == "planes":
        x += begin
        w += begin // 8
        w_scale += begin // GROUP
    else:
        x += begin
        w += begin
        if KIND == "group128":
            x_scale += begin // 128
            w_scale += begin // 128
    total, _ = multiply(
        x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, 0,
        tl.minimum(chunk, K - begin),
        False, KIND, ELEMENT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, ONE_SCALE,
    )  # fmt: skip
    if SWAP:
        total = tl.trans(total)
    inside = there[:, None] & (cols < N)[None, :]
    at = x_rows[:, None] * N + cols[None, :]
    if SPLITS > 1:
        size = T.to(tl.int64) * N
        tl.store(parts + split * size + at, total, mask=inside)
        tl.debug_barrier()  # or else the arrival of one thread says nothing about the others' stores
        last = tl.atomic_add(arrivals + pid, 1, sem="acq_rel") == SPLITS - 1
        inside = inside & last
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Four at a time are on their way: all eight would not leave registers enough.
        for first in range(0, SPLITS, 4):
            for i in tl.static_range(4):
                part = first + i
                written = inside & (part < SPLITS)
                total += tl.load(parts + part * size + at, mask=written, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + pid, 0, mask=last)
    if HAS_FACTOR:
        total *= tl.load(w_factor + w_rows)[None, :]
    if HAS_X_FACTOR:
        total *= tl.load(x_factor)
    if HAS_BIAS:
        total += tl.load(bias + w_rows).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def few_rows_kernel(
    x,  # [T, K] in 16 bits
    w,  # [N, K]
    w_scale,
    w_factor,  # HAS_FACTOR: [N] fp32
    bias,  # HAS_BIAS: [N]
    out,  # [T, N]
    N,
    K,
    x_stride,
    w_stride,
    ws_stride,
    BLOCK_N: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,  # steps whose weights are loaded before the kernel waits for x
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (column block, row of x): see `kernels_few`."""
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < N, cols, first).to(tl.int64)
    there = token >= 0
    weights = ()  # type: tuple[tl.tensor, ...]
    for step in tl.static_range(EARLY):
        weights = weights + (
            load_weights(
                there, w, w_scale, rows, first, w_stride, ws_stride, K, step * COLS, KIND, GROUP, C, W, EVEN_K
            ),
        )
    if KIND == "scaled":
        row_scale = tl.load(w_scale + rows * ws_stride)
    if HAS_FACTOR:
        factor = tl.load(w_factor + rows)
    if HAS_BIAS:
        row_bias = tl.load(bias + rows)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x += token * x_stride
    columns = ()  # type: tuple[tl.tensor, ...]
    for step in tl.static_range(EARLY):
        columns = columns + (load_columns(x, there, K, step * COLS, C, W, EVEN_K),)
    total = tl.zeros((BLOCK_N, C, W), tl.float32)
    for step in tl.static_range(EARLY):
        total = add_loaded(total, weights[step], columns[step], 1.0, KIND)
    # Unrolled, so that the weights of several steps are on their way at once.
    for start in tl.range(EARLY * COLS, K, COLS, loop_unroll_factor=UNROLL):
        total = add_product(
            total, x, 1.0, there, w, w_scale, rows, first, w_stride, ws_stride, K, start,
            KIND, ELEMENT, GROUP, PACKED, C, W, EVEN_K,
        )  # fmt: skip
    sums = sum_rows(total)
    if KIND == "scaled":
        sums *= row_scale
    if HAS_FACTOR:
        sums *= factor
    if HAS_BIAS:
        sums += row_bias.to(tl.float32)
    tl.store(out + token * N + cols, sums.to(out.dtype.element_ty), mask=cols < N)
