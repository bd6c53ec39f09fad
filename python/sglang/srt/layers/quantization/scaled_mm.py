"""y = x @ w^T (+ bias) with e4m3 on both sides: torch's scaled product for many rows, Triton's tiles for fewer.

On GPUs with wgmma torch uses cuBLAS (since CUDA 12.9; before, CUTLASS for scales per row). Its neighbouring blocks
share loads of the bulk copy engine (TMA multicast), which Triton's tiles cannot. `problem_of` tries it on the GPU
before it is chosen. Reference: `LinearWeight.dequantized` and `reference.round_activation`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.conditions import SCALED_MM_ROWS
from sglang.srt.kernels.spec import Need
from sglang.srt.kernels.tile_configs import TileConfigs, config_for
from sglang.srt.layers.quantization import reference
from sglang.srt.layers.quantization.activations import Activations, QuantizedActivations, values_of
from sglang.srt.layers.quantization.linear_weight import LinearWeight
from sglang.srt.layers.triton_ops.linear_products import Apply, operand, pack, packed_linear
from sglang.srt.layers.triton_ops.linear_tiles import LIBRARY

BLOCKS_OF_K = 4
"""Scales of 128 weight rows are padded to a multiple of this number of blocks of 128 columns."""
ROWS_OF_X = 4
"""Scales of 128 columns of x are contiguous, padded to a multiple of this number so that runs are 16-byte aligned."""
PROBE_ROWS, PROBE_SHAPE = SCALED_MM_ROWS + 6, (272, 384)
"""Sizes that need padding: rows of x, (rows, columns) of the weight."""
PROBE_LIMIT = 1e-2
"""Largest relative error of the result; rounding to bfloat16 alone causes 2e-3."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in the form of torch's product: `data` [K, N] e4m3 with contiguous columns; `scale` fp32 [1, N], or with
    `blocks` [padded K / 128, ceil(N / 128)] with contiguous columns."""

    data: torch.Tensor
    scale: torch.Tensor
    blocks: bool


def scaled_weight(weight: LinearWeight) -> ScaledWeight:
    """Returns a view of a weight whose sizes the product supports (`linear_tiles.library_takes`)."""
    if weight.scheme.group[1] == 0:
        return ScaledWeight(weight.data.t(), weight.scale[None, :], False)
    room = -weight.scale.shape[1] % BLOCKS_OF_K
    return ScaledWeight(weight.data.t(), F.pad(weight.scale, (0, room)).t(), True)


def scaled_product(
    data: torch.Tensor, scale: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns [T, N] for data [T, K] e4m3 and its scales fp32 ([T], [1], or [T, K / 128] with blocks)."""
    kinds = F.ScalingType
    if not weight.blocks:
        by_row = scale.expand(len(data)).contiguous()[:, None]
        return F.scaled_mm(
            data, weight.data, by_row, kinds.RowWise, weight.scale, kinds.RowWise,
            bias=bias, output_dtype=dtype, use_fast_accum=True,  # as wgmma adds in Triton's tiles
        )  # fmt: skip
    num_rows = len(data)
    room = -num_rows % ROWS_OF_X
    if room:
        data = F.pad(data.view(torch.uint8), (0, 0, 0, room)).view(data.dtype)
        scale = F.pad(scale, (0, 0, 0, room))
    by_column = scale.t().contiguous().t()
    out = F.scaled_mm(
        data, weight.data, by_column, kinds.BlockWise1x128, weight.scale, kinds.BlockWise128x128,
        bias=bias, output_dtype=dtype,
    )  # fmt: skip
    return out[:num_rows]


def quantized_linear(weight: LinearWeight, arch: ArchTraits, configs: TileConfigs) -> Apply:
    """Returns a linear layer like `linear_products.quantized_linear`; its Triton kernels compute the steps that the
    tile configs do not assign to torch, and outputs in another dtype than x's."""
    matrix = pack(weight, arch)
    by_triton = packed_linear(matrix, tuple(config for config in configs if config.variant != LIBRARY))
    if configs[-1].variant != LIBRARY:
        return by_triton
    by_torch = scaled_weight(matrix.weight)

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        config = config_for(configs, values.numel() // matrix.cols)
        if config.variant != LIBRARY or out_dtype not in (None, values.dtype):
            return by_triton(x, bias, out_dtype)
        flat = x if isinstance(x, QuantizedActivations) else values.reshape(-1, matrix.cols)
        data, scale, _, _ = operand(flat, matrix)
        out = scaled_product(data, scale, by_torch, bias, values.dtype)
        return out.view(*values.shape[:-1], out.shape[-1])

    return run


def problem_of(need: Need) -> str:
    """Returns why torch's product cannot serve weights of `need.quant` on this process's GPU; "" if it can."""
    return _problem("fp8_block" if need.quant == "fp8_block" else "fp8_channel", getattr(torch, need.q_dtype))


@functools.cache
def _problem(scheme: str, dtype: torch.dtype) -> str:
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (2.10 has)"
    try:
        error = probe_error(SCHEMES[scheme], dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as failure:  # whatever a library raises, the server starts without it
        return f"torch.nn.functional.scaled_mm fails here: {str(failure).strip().splitlines()[0][:200]}"
    if error < PROBE_LIMIT:
        return ""
    return f"torch.nn.functional.scaled_mm is wrong here: {error:.1e} of the result's norm"


def probe_error(scheme: Scheme, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the relative error of a product of numbers with different scales, with a bias if supported."""
    generator = torch.Generator().manual_seed(0)
    (rows, cols), blocks = PROBE_SHAPE, scheme.group[1] != 0
    x, w = torch.randn(PROBE_ROWS, cols, generator=generator), torch.randn(rows, cols, generator=generator)
    x *= 1 + torch.arange(PROBE_ROWS)[:, None] % 5 + torch.arange(cols) // 128
    w *= 1 + torch.arange(rows)[:, None] // 128 + 2 * (torch.arange(cols) // 128)
    bias = None if blocks else torch.randn(rows, generator=generator).to(device, dtype)
    as_weight = Scheme("activation", "e4m3", (1, 128) if blocks else (1, 0), "float32", None)
    a, b = reference.quantize(x.to(device), as_weight), reference.quantize(w.to(device), scheme)
    want = reference.dequantize(a, as_weight).double() @ reference.dequantize(b, scheme).double().t()
    weight = scaled_weight(LinearWeight(b.data, scheme, b.scale))
    got = scaled_product(a.data, a.scale, weight, bias, dtype).double()
    if bias is not None:
        want += bias.double()
    return float((got - want).norm() / want.norm())
