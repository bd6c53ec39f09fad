"""Launches of products with EXL3's trellises. Reference: `layers.quantization.trellis.trellis_linear`.

Steps of up to 16 rows decode tiles in registers, and split the columns of x over programs by the sizes of the matrix
alone, so that a row's result does not depend on how many there are. Others decode the matrix to float16, some columns
at a time, for the library's product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from sglang.srt.configs.trellis import BLOCK, DECODED_BYTES, TILE, Trellis
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.layers.quantization.linear_weight import QuantizedProduct
from sglang.srt.layers.quantization.trellis import MULTIPLIERS, SUMMANDS, TrellisWeight
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.trellis import (
    BLOCK_K,
    BLOCK_N,
    decode_kernel,
    product_kernel,
    transform_inputs_kernel,
    transform_outputs_kernel,
)

MAX_ROWS = 16
PRODUCT_TILE = {"num_warps": 1, "num_stages": 1}
DECODE_TILE = {"num_warps": 1, "num_stages": 1}
TRANSFORM_TILE = {"BLOCK_M": 16, "num_warps": 4, "num_stages": 1}
TRANSFORM_MANY_TILE = {"BLOCK_M": 32, "num_warps": 8, "num_stages": 1}
"""For more than MAX_ROWS: each program makes the signs anew, which takes as long as the rest. 64 rows would spill."""
PARTS_AT_ONCE = 4
"""Parts of a product of few rows that are loaded without waiting for each other."""
PROGRAMS = 4096
"""Programs of one warp into which a product of few rows is split, if its columns allow."""
LEAST_CHUNK = 256
"""Fewest columns of x of a program."""


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A module's tiles int32 [K / 16, N / 16, words], the row of the input scales, and the first of its columns."""

    form: Trellis
    tiles: torch.Tensor
    inputs: int
    first: int

    @property
    def columns(self) -> int:
        """Returns the columns of the module, padded."""
        return self.tiles.shape[1] * TILE


@dataclass(frozen=True, slots=True)
class PackedTrellis:
    """Modules side by side, as kernels take them: `suh` [inputs, padded K], `svh` [padded columns], `places` int32
    [blocks of columns, 3]: where a block's first column goes, and the output columns that are its module's."""

    modules: Sequence[PackedModule]
    suh: torch.Tensor
    svh: torch.Tensor
    places: torch.Tensor
    cols: int
    rows: int


def pack(weight: TrellisWeight) -> PackedTrellis:
    """Returns the weight as kernels take it; slices of one module share its input scales."""
    inputs: list[torch.Tensor] = []
    modules, places, first, out = [], [], 0, 0
    for module in weight.modules:
        known = [i for i, suh in enumerate(inputs) if suh is module.suh]
        if not known:
            inputs.append(module.suh)
        row = known[0] if known else len(inputs) - 1
        modules.append(PackedModule(module.form, module.tiles.view(torch.int32), row, first))
        begins = range(out - module.first, out - module.first + len(module.svh), BLOCK)
        places += [(begin, out, out + module.rows) for begin in begins]
        first, out = first + len(module.svh), out + module.rows
    svh = torch.cat([module.svh for module in weight.modules])
    table = torch.tensor(places, dtype=torch.int32, device=svh.device)
    return PackedTrellis(modules, torch.stack(inputs), svh, table, weight.cols, out)


def trellis_linear(weight: TrellisWeight, arch: ArchTraits, configs: TileConfigs) -> QuantizedProduct:
    """Returns the product op of a weight."""
    packed = pack(weight)

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        out = product(values.reshape(-1, values.shape[-1]), packed, bias, out_dtype)
        return out.view(*values.shape[:-1], packed.rows)

    return run


def product(
    x: torch.Tensor, weight: PackedTrellis, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns x [T, K] times the weight, [T, N]."""
    num_rows, (num_inputs, size), columns = len(x), weight.suh.shape, len(weight.svh)
    out = torch.empty((num_rows, weight.rows), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    inner = torch.empty((num_inputs, num_rows, size), dtype=torch.float16, device=x.device)
    transform_inputs(x, weight.suh, inner)
    few = num_rows <= MAX_ROWS
    splits, chunk = splits_of(columns, size) if few else (1, size)
    dtype = torch.float32 if few else torch.float16
    parts = torch.empty((splits, num_rows, columns), dtype=dtype, device=x.device)
    for module in weight.modules:
        if few:
            few_rows(inner[module.inputs], module, parts, chunk)
        else:
            many_rows(inner[module.inputs], module, parts[0])
    transform_outputs(parts, weight.svh, weight.places, out, bias)
    return out


def numbers_of(form: Trellis) -> tuple[int, int]:
    """Returns the codebook's multiplier and summand as kernels take them, in 32 bits with a sign."""
    multiplier = MULTIPLIERS[form.codebook]
    signed = multiplier - (1 << 32) if multiplier >> 31 else multiplier
    return signed, SUMMANDS.get(form.codebook, 0)


def kind_of(form: Trellis) -> dict[str, int]:
    """Returns the constants of kernels for a form."""
    return {"HALF_BITS": form.half_bits, "MUL1": form.codebook == "mul1"}


def transform_inputs(
    x: torch.Tensor, suh: torch.Tensor, out: torch.Tensor, experts: torch.Tensor | None = None, per_row: int = 1
) -> None:
    """Fills out [modules, T, padded K] with x [T, K] times the scales of each module, transformed. `experts` [T]: the
    rows of `suh` for a row of `out`, which is made of row `number // per_row` of x."""
    num_modules, num_rows, size = out.shape
    tile = TRANSFORM_TILE if num_rows <= MAX_ROWS else TRANSFORM_MANY_TILE
    grid = (triton.cdiv(num_rows, tile["BLOCK_M"]), size // BLOCK, num_modules)
    transform_inputs_kernel[grid](
        x, suh, suh if experts is None else experts, out, num_rows, x.shape[1], size, x.stride(0), per_row,
        ROUTED=experts is not None, **tile, **pdl.options(),
    )  # fmt: skip


def transform_outputs(
    parts: torch.Tensor,
    svh: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> None:
    """Fills out [T, N] with the sums of parts [splits, T, columns], transformed, times scales; `experts` as above."""
    splits, num_rows, columns = parts.shape
    tile, at_once = (TRANSFORM_TILE, PARTS_AT_ONCE) if num_rows <= MAX_ROWS else (TRANSFORM_MANY_TILE, 1)
    grid = (triton.cdiv(num_rows, tile["BLOCK_M"]), len(places))
    transform_outputs_kernel[grid](
        parts, svh, svh if experts is None else experts, places, out if bias is None else bias, out, num_rows,
        out.stride(0), columns, splits,
        AT_ONCE=at_once, ROUTED=experts is not None, HAS_BIAS=bias is not None, **tile, **pdl.options(),
    )  # fmt: skip


def splits_of(columns: int, size: int) -> tuple[int, int]:
    """Returns into how many parts the columns of x are split, and how many columns a part has."""
    programs = columns // BLOCK_N.value
    wanted = max(1, min(PROGRAMS // programs, size // LEAST_CHUNK))
    chunk = triton.cdiv(triton.cdiv(size, wanted), BLOCK) * BLOCK
    return triton.cdiv(size, chunk), chunk


def few_rows(x: torch.Tensor, module: PackedModule, parts: torch.Tensor, chunk: int) -> None:
    """Fills the module's columns of parts [splits, T, columns] with sums over `chunk` columns of x [T, padded K]."""
    grid = (module.columns // BLOCK_N.value, parts.shape[0])
    product_kernel[grid](
        x, module.tiles, parts, module.tiles, module.tiles, module.tiles, len(x), x.shape[1], module.tiles.shape[1],
        parts.shape[2], module.first, chunk, 0, *numbers_of(module.form),
        BLOCK_M=MAX_ROWS, ROUTED=False, **kind_of(module.form), **PRODUCT_TILE,
        **pdl.options(),
    )  # fmt: skip


def many_rows(x: torch.Tensor, module: PackedModule, out: torch.Tensor) -> None:
    """Fills the module's columns of out [T, columns] with x [T, padded K] times its matrix."""
    size = x.shape[1]
    step = max(BLOCK, DECODED_BYTES // (2 * size) // BLOCK * BLOCK)
    for begin in range(0, module.columns, step):
        width = min(step, module.columns - begin)
        decoded = torch.empty((size, width), dtype=torch.float16, device=x.device)
        decode_kernel[(width // BLOCK_N.value, size // BLOCK_K.value)](
            module.tiles, decoded, module.tiles.shape[1], width, begin // TILE, *numbers_of(module.form),
            **kind_of(module.form), **DECODE_TILE,
        )  # fmt: skip
        torch.mm(x, decoded, out=out[:, module.first + begin : module.first + begin + width])
