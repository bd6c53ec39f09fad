"""y = x @ w^T (+ bias) with a quantized weight. Reference: `LinearWeight.dequantized` and `reference.round_activation`.

A row or two: threads along K multiply and add, x stays in 16 bits, and the time is that of reading the weight once.
More: x is quantized where the scheme says so, and tiles are multiplied with matrix instructions; while rows are few, K
is split over programs, and the last one to finish a tile sums the parts, always in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.launch import fallbacks_of
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import TileConfigs, config_for
from sglang.srt.layers.moe.expert_weights import ExpertWeights, repack
from sglang.srt.layers.quantization.activations import Activations, QuantizedActivations, values_of
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.triton_ops import pdl, scaled_dot
from sglang.srt.layers.triton_ops.linear_tiles import FEW, MANY, num_splits, swaps
from sglang.srt.layers.triton_ops.quantize import quantize_activation
from sglang.srt.layers.triton_ops.scaled_dot import STRIP, multiply
from sglang.srt.layers.triton_ops.streamed_dot import (
    add_loaded,
    add_product,
    load_columns,
    load_weights,
    pair_launch,
    sum_rows,
)

Apply = Callable[..., torch.Tensor]


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


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A LinearWeight in the kernels' layout for one GPU. `arrivals` counts the finished parts of each tile; `packed`:
    four-bit columns as published, not in planes."""

    weight: LinearWeight
    product: ScaledProduct
    cols: int
    packed: bool
    arch: ArchTraits
    arrivals: torch.Tensor


def pack(weight: LinearWeight, arch: ArchTraits) -> PackedWeight:
    """Returns the weight in the kernels' layout. Four-bit weights that are dequantized in registers are reordered, in
    place if no padding is needed."""
    scheme = weight.scheme
    one = torch.ones(1, device=weight.data.device) if scheme.global_scale else None
    as_expert = ExpertWeights(weight.data[None], scheme, weight.scale[None], one)
    arranged = repack(as_expert, arch.features)
    assert arranged.scale is not None
    data, in_planes = arranged.data[0], arranged.plane_cols is not None
    rows, cols = weight.shape
    return PackedWeight(
        dataclasses.replace(weight, data=data, scale=arranged.scale[0]),
        product_of(scheme, arch.features),
        cols,
        scheme.bits == 4 and not in_planes,
        arch,
        torch.zeros(triton.cdiv(rows, 16), dtype=torch.int32, device=data.device),
    )


def quantized_linear(weight: LinearWeight, arch: ArchTraits, configs: TileConfigs) -> Apply:
    """(x [..., K] in 16 bits, or rows with their quantized form; bias [N] or None) -> [..., N] in x's type, or another
    one. Safe in CUDA graphs. `configs`: the plan's for this weight.

    Takes the weight: its tensors may be reordered."""
    return packed_linear(pack(weight, arch), configs)


def packed_linear(matrix: PackedWeight, configs: TileConfigs) -> Apply:
    """Returns a function that multiplies activations [T, K] by a packed matrix, with tiles by number of tokens: it
    takes (x, bias, out_dtype) and returns [T, N]."""
    op = f"linear/{matrix.weight.scheme.name}"
    fallbacks = {
        config.max_tokens: fallbacks_of(op, config, __name__, scaled_dot.__name__)
        for config in configs
        if config.variant == MANY
    }

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        flat = values.reshape(-1, matrix.cols)
        config = config_for(configs, len(flat))
        if config.variant == FEW:
            out = few_rows(flat, matrix, config.tiles[0], bias, out_dtype)
        else:
            rows = x if isinstance(x, QuantizedActivations) else flat
            out = fallbacks[config.max_tokens].run(lambda tiles: many_rows(rows, matrix, tiles[0], bias, out_dtype))
        return out.view(*values.shape[:-1], out.shape[-1])

    return run


def few_rows(
    x: torch.Tensor,
    matrix: PackedWeight,
    tile: Tile,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns [T, N] for x [T, K] with a tile of `linear_tiles.few_cut`; the weight is read once per row."""
    num_rows, num_cols = len(x), matrix.weight.data.shape[0]
    out = torch.empty((num_rows, num_cols), dtype=out_dtype or x.dtype, device=x.device)
    launch = pair_launch(matrix.product, tile, matrix.cols)
    data = matrix.weight.data.view(torch.int32) if matrix.packed else matrix.weight.data
    factor = matrix.weight.row_factor
    if num_rows:
        few_rows_kernel[(triton.cdiv(num_cols, launch["BLOCK_N"]), num_rows)](
            x, data, matrix.weight.scale, out if factor is None else factor, out if bias is None else bias, out,
            num_cols, matrix.cols, x.stride(0), data.stride(0), matrix.weight.scale.stride(0),
            **launch, HAS_FACTOR=factor is not None, HAS_BIAS=bias is not None, **pdl.options(),
        )  # fmt: skip
    return out


def many_rows(
    x: Activations,
    matrix: PackedWeight,
    tile: Tile,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns [T, N] for x [T, K] by matrix tiles. Raises OutOfResources if the tile does not launch."""
    values = values_of(x)
    out = torch.empty((len(values), matrix.weight.data.shape[0]), dtype=out_dtype or values.dtype, device=values.device)
    weight, product = matrix.weight, matrix.product
    num_rows, num_cols = out.shape
    features = matrix.arch.features
    num_tiles = triton.cdiv(num_rows, tile["BLOCK_M"]) * triton.cdiv(num_cols, tile["BLOCK_N"])
    splits = 1
    if num_tiles <= len(matrix.arrivals):
        splits = num_splits(num_rows, num_tiles, matrix.cols, matrix.arch.num_sms, features)
    launch = tile_launch(product, tile, matrix.cols, splits, features)
    chunk, splits = launch.pop("chunk"), launch["SPLITS"]
    data, scale, scale_stride, factor = operand(x, matrix)
    parts = torch.empty((splits, num_rows, num_cols), device=out.device) if splits > 1 else out
    row_factor = weight.row_factor
    tiles_kernel[(num_tiles, splits)](
        data, scale, weight.data, weight.scale, out if row_factor is None else row_factor,
        out if factor is None else factor, out if bias is None else bias, out, parts, matrix.arrivals,
        num_rows, num_cols, matrix.cols, chunk, data.stride(0), scale_stride, weight.data.stride(0),
        weight.scale.stride(0), **launch,
        HAS_FACTOR=row_factor is not None, HAS_X_FACTOR=factor is not None, HAS_BIAS=bias is not None,
        **pdl.options(),
    )  # fmt: skip
    return out


def tile_launch(
    product: ScaledProduct, tile: Tile, cols: int, splits: int, features: Collection[str]
) -> dict[str, Any]:
    """Constants of `tiles_kernel`, and `chunk`, the columns of a split; the number of splits may get smaller."""
    step = max(tile["BLOCK_K"], STRIP.value)
    chunk = triton.cdiv(triton.cdiv(cols, splits), step) * step
    return {
        **tile,
        **product.constants,
        "chunk": chunk,
        "SPLITS": triton.cdiv(cols, chunk),
        "EVEN_K": cols % step == 0,
        "SWAP": swaps(tile, features),
        "ONE_SCALE": 128 % tile["BLOCK_N"] == 0,
    }


def operand(x: Activations, matrix: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """x as the product takes it, its scales and their stride between rows (0: one for all), and the factor of all."""
    product, weight = matrix.product, matrix.weight
    if isinstance(x, QuantizedActivations):
        if x.form == product.activation and weight.scheme.element == "e4m3":
            return x.data, x.scale, x.scale.stride(0), None
        x = x.values
    if product.activation is None:
        return x, x, 0, None
    scheme = dataclasses.replace(weight.scheme, activation=product.activation)
    data, scale = quantize_activation(x, scheme, weight.input_scale)
    factor = weight.input_scale if product.activation == "nvfp4" else None
    return data, scale, 0 if product.activation == "tensor" else scale.stride(0), factor
