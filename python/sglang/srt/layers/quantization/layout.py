"""The layouts of quantized matrices in checkpoints: names, dtypes and packing of their tensors, as data.

A layout is looked up by what `configs/quantization.py` detects: the storage (who wrote the checkpoint) and the scheme.
Linear layers and experts read the same table. Sources: the files of published checkpoints, and compressed-tensors and
ModelOpt, which write most of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import FLOATS, Convert
from sglang.srt.layers.quantization.reference import pack_nibbles, unpack_nibbles


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns words of packed 4-bit codes, the first in the low bits, as bytes: [..., n] -> [..., n * bytes per
    word]."""
    return tensor.contiguous().view(torch.uint8)


def reciprocal(tensor: torch.Tensor) -> torch.Tensor:
    """Returns 1 / tensor in fp32."""
    return tensor.float().reciprocal()


def signed_bytes(words: torch.Tensor) -> torch.Tensor:
    """Returns words of codes of 8 bits plus 128 as int8: [..., n] -> [..., 4 n]."""
    return (as_bytes(words) ^ 0x80).view(torch.int8)


def transposed_signed_bytes(words: torch.Tensor) -> torch.Tensor:
    """Returns words packed along K, [K / 4, N], of codes of 8 bits plus 128 as int8 [N, K]."""
    return signed_bytes(words.T)


def unsigned_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Returns bytes of two signed codes of 4 bits as bytes of codes plus 8."""
    return as_bytes(codes) ^ 0x88


def transposed_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns words packed along K, [K / 8, N], as bytes [N, K / 2]."""
    return as_bytes(tensor.T)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the transposed matrix."""
    return tensor.T


AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an AWQ word, counted from the low bits, that holds each of eight neighbouring rows' code."""


def codes_of_rows(words: torch.Tensor, nibbles: Sequence[int]) -> torch.Tensor:
    """Returns codes uint8 [..., 8 n] from words int32 [..., n] of eight rows each; row i of eight is in nibble
    `nibbles[i]`."""
    codes = words.reshape(-1).view(torch.uint8).view(*words.shape, 4)
    return unpack_nibbles(codes)[..., list(nibbles)].flatten(-2)


def awq_bytes(words: torch.Tensor) -> torch.Tensor:
    """Returns AWQ's words [K, N / 8] as bytes [N, K / 2]."""
    return pack_nibbles(codes_of_rows(words, AWQ_NIBBLES).T)


def awq_shifts(words: torch.Tensor) -> torch.Tensor:
    """Returns 8 minus AWQ's zero points, int8 [N, K / group], from words [K / group, N / 8]."""
    return 8 - codes_of_rows(words, AWQ_NIBBLES).T.to(torch.int8)


def row_shifts(words: torch.Tensor) -> torch.Tensor:
    """Returns the same from words [N / 8, K / group] in row order."""
    return 8 - codes_of_rows(words.T, range(8)).T.to(torch.int8)


TILE_ROWS = 32
"""Rows that share the scales of DeepSeek-V4.1's tiles."""


def rows_of_tiles(exponents: torch.Tensor) -> torch.Tensor:
    """Repeats scales of 32 x 32 tiles, [N / 32, K / 32], for each row: bytes [N, K / 32]."""
    return as_bytes(exponents).repeat_interleave(TILE_ROWS, 0)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a matrix: the last part of its name, its possible dtypes, and the conversion to our format.

    One stored element holds `columns`, or `rows`, of the matrix. With `transposed` it is stored [K, N], with `spread`
    [N, 1, K, 1].
    """

    name: str
    dtypes: tuple[str, ...] = FLOATS
    convert: Convert | None = None
    columns: int = 1
    rows: int = 1
    transposed: bool = False
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one matrix [N, K]. `zeros`: zero points of groups, converted to 8 minus the zero point. `ignore`:
    names of tensors that are redundant, or that the scheme does not read.

    Experts that are one tensor have forms of their own: `experts_fused`.
    """

    data: Leaf
    scale: Leaf
    global_scale: Leaf | None = None
    input_scale: Leaf | None = None
    zeros: Leaf | None = None
    ignore: tuple[str, ...] = ()


_E4M3 = Leaf("weight", ("F8_E4M3",))
_INT8 = Leaf("weight", ("I8",))
_FP4 = Leaf("weight", ("U8", "I8"), as_bytes, columns=2)
_E8M0 = ("U8", "F8_E8M0")
_SCALE = Leaf("weight_scale")
_EXPONENTS = replace(_SCALE, dtypes=_E8M0, convert=as_bytes)
# Powers of two of blocks may be stored as exponents.
_BLOCKS = Leaf("weight_scale_inv", (*FLOATS, "F8_E8M0"), torch.Tensor.float)
_INPUT = Leaf("input_scale")
_INT4 = Layout(
    Leaf("weight_packed", ("I32",), as_bytes, columns=8),
    _SCALE,
    zeros=Leaf("weight_zero_point", ("I32",), row_shifts, rows=8),
    ignore=("weight_shape",),
)  # codes and zero points plus 8, as ours
_GPTQ = Layout(
    Leaf("qweight", ("I32",), transposed_bytes, columns=8, transposed=True),
    Leaf("scales", convert=transposed, transposed=True),
    # Symmetric and in natural order, which detection has made sure of: all zero points are 8, all groups consecutive.
    ignore=("qzeros", "g_idx"),
)
_AWQ = Layout(
    Leaf("qweight", ("I32",), awq_bytes, rows=8, transposed=True),
    Leaf("scales", convert=transposed, transposed=True),
    zeros=Leaf("qzeros", ("I32",), awq_shifts, rows=8, transposed=True),
)

_INT8_PACKED = replace(_INT4, data=Leaf("weight_packed", ("I32",), signed_bytes, columns=4), zeros=None)
_INT8_GPTQ = replace(_GPTQ, data=Leaf("qweight", ("I32",), transposed_signed_bytes, columns=4, transposed=True))
_W4AFP8 = Layout(
    Leaf("weight", ("I8", "U8"), unsigned_nibbles, columns=2),
    replace(_SCALE, name="weight_scale_inv"),
    ignore=("input_scale",),
)

LAYOUTS: Mapping[tuple[str, str], Layout] = {
    ("fp8", "fp8_tensor"): Layout(_E4M3, _SCALE, input_scale=_INPUT),
    ("fp8", "fp8_block"): Layout(_E4M3, _BLOCKS),
    ("deepseek_v4", "fp8_block"): Layout(_E4M3, replace(_BLOCKS, name="scale")),
    # Powers of two for tiles of 32 x 32 are repeated for the rows of a tile: MXFP8.
    ("deepseek_v41", "mxfp8"): Layout(_E4M3, Leaf("scale", _E8M0, rows_of_tiles, rows=TILE_ROWS)),
    # DeepSeek-V4's experts.
    ("fp8", "mxfp4"): Layout(_FP4, Leaf("scale", _E8M0, as_bytes)),
    ("fp8", "mxfp4_mxfp8"): Layout(_FP4, Leaf("scale", _E8M0, as_bytes)),
    # Whose other weights are in blocks of FP8.
    ("mimo", "mxfp4"): Layout(_FP4, _EXPONENTS),
    ("mimo", "mxfp4_mxfp8"): Layout(_FP4, _EXPONENTS),
    ("ling", "mxfp4"): Layout(_FP4, replace(_EXPONENTS, name="weight_scale_inv")),
    ("ling", "mxfp4_mxfp8"): Layout(_FP4, replace(_EXPONENTS, name="weight_scale_inv")),
    ("mxfp8", "mxfp8"): Layout(_E4M3, Leaf("weight_scale_inv", _E8M0, as_bytes)),
    ("compressed-tensors", "fp8_tensor"): Layout(_E4M3, _SCALE, input_scale=_INPUT),
    ("compressed-tensors", "fp8_channel"): Layout(_E4M3, _SCALE),
    ("compressed-tensors", "fp8_block"): Layout(_E4M3, replace(_BLOCKS, name="weight_scale")),
    ("compressed-tensors", "fp8_tensor_a16"): Layout(_E4M3, _SCALE),
    ("compressed-tensors", "fp8_channel_a16"): Layout(_E4M3, _SCALE),
    ("compressed-tensors", "fp8_block_a16"): Layout(_E4M3, replace(_BLOCKS, name="weight_scale")),
    ("compressed-tensors", "mxfp8"): Layout(_E4M3, _EXPONENTS),
    ("compressed-tensors", "int8_channel"): Layout(_INT8, _SCALE),
    ("compressed-tensors", "int4_g32"): _INT4,
    ("compressed-tensors", "int4_g64"): _INT4,
    ("compressed-tensors", "int4_g128"): _INT4,
    ("compressed-tensors", "int8_g32"): _INT8_PACKED,
    ("compressed-tensors", "int8_g128"): _INT8_PACKED,
    ("int-quantized", "int8_g32"): Layout(_INT8, _SCALE),
    ("int-quantized", "int8_g128"): Layout(_INT8, _SCALE),
    ("w4afp8", "int4_g32"): _W4AFP8,
    ("w4afp8", "int4_g64"): _W4AFP8,
    ("w4afp8", "int4_g128"): _W4AFP8,
    # The factors of a compressed-tensors checkpoint divide: 448 * 6 / the largest value.
    ("compressed-tensors", "nvfp4"): Layout(
        Leaf("weight_packed", ("U8",), columns=2),
        Leaf("weight_scale", ("F8_E4M3",)),
        Leaf("weight_global_scale", convert=reciprocal),
        Leaf("input_global_scale", convert=reciprocal),
    ),
    # Whose activations stay in 16 bits.
    ("compressed-tensors", "nvfp4_a16"): Layout(
        Leaf("weight_packed", ("U8",), columns=2),
        Leaf("weight_scale", ("F8_E4M3",)),
        Leaf("weight_global_scale", convert=reciprocal),
        ignore=("input_global_scale",),
    ),
    ("compressed-tensors", "mxfp4"): Layout(Leaf("weight_packed", ("U8",), columns=2), _EXPONENTS),
    ("compressed-tensors", "mxfp4_mxfp8"): Layout(Leaf("weight_packed", ("U8",), columns=2), _EXPONENTS),
    ("modelopt", "fp8_tensor"): Layout(_E4M3, _SCALE, input_scale=_INPUT),
    ("modelopt", "fp8_channel"): Layout(_E4M3, _SCALE),
    # Where the scales are called as in DeepSeek's checkpoints: `stored_form`.
    ("modelopt", "fp8_block"): Layout(_E4M3, replace(_BLOCKS, name="weight_scale", spread=True)),
    ("modelopt", "nvfp4"): Layout(
        replace(_FP4, dtypes=("U8",)), Leaf("weight_scale", ("F8_E4M3",)), Leaf("weight_scale_2"), _INPUT
    ),
    # Of a calibration that served other schemes of the same export.
    ("modelopt", "nvfp4_a16"): Layout(
        replace(_FP4, dtypes=("U8",)),
        Leaf("weight_scale", ("F8_E4M3",)),
        Leaf("weight_scale_2"),
        ignore=("input_scale",),
    ),
    ("modelopt", "mxfp8"): Layout(_E4M3, _EXPONENTS),
    ("gptq", "int4_g32"): _GPTQ,
    ("gptq", "int4_g64"): _GPTQ,
    ("gptq", "int4_g128"): _GPTQ,
    ("gptq", "int8_g32"): _INT8_GPTQ,
    ("gptq", "int8_g128"): _INT8_GPTQ,
    ("awq", "int4_g32"): _AWQ,
    ("awq", "int4_g64"): _AWQ,
    ("awq", "int4_g128"): _AWQ,
}


def layout_of(quant: ModuleQuant) -> Layout:
    """Returns the layout of a module. Raises UserError for an unknown combination of storage and scheme."""
    layout = LAYOUTS.get((quant.storage, quant.scheme))
    if layout is None:
        known = sorted(scheme for storage, scheme in LAYOUTS if storage == quant.storage)
        has = ", ".join(known) or "none"
        raise UserError(f"{quant.scheme} weights in a {quant.storage} checkpoint are not supported (has {has})")
    layout = layout if quant.static_input else replace(layout, input_scale=None)
    return layout if quant.zero_points else replace(layout, zeros=None)


def is_redundant(config: QuantConfig | None, name: str) -> bool:
    """Returns whether the checkpoint tensor `name` is redundant, or not read by its module's scheme."""
    module, _, leaf = name.rpartition(".")
    quant = config.of(module) if config is not None else None
    layout = LAYOUTS.get((quant.storage, quant.scheme)) if quant is not None else None
    return layout is not None and leaf in layout.ignore
