"""Parts of stored quantized matrices, for linear layers and experts: slices, tensor parts, dummy numbers."""

from __future__ import annotations

import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Convert, Fill, Index, TensorPart, WeightShard, constant
from sglang.srt.layers.quantization.layout import Leaf
from sglang.srt.layers.quantization.reference import quantize

# Random codes times these scales have a standard deviation near 0.02, like unquantized dummy weights.
DUMMY_SCALES = {"e4m3": 0.02 / 104, "int8": 0.02 / 74, "int4": 0.02 / 4.6, "e2m1": 0.02 / 2.9}
_DUMMY_EXPONENTS = {"e4m3": 127 - 12, "e2m1": 127 - 7}
DUMMY_INPUT_SCALE = 0.02
assert all(scheme.element in DUMMY_SCALES for scheme in SCHEMES.values())


def dummy_scale(scheme: Scheme) -> Fill:
    """Returns the fill of dummy scales. With a global scale they are 1, and the global one is from DUMMY_SCALES."""
    if scheme.scale == "e8m0":
        return constant(_DUMMY_EXPONENTS[scheme.element])
    return constant(1.0 if scheme.global_scale else DUMMY_SCALES[scheme.element])


def length(part: slice) -> int:
    """Returns the number of elements of a slice."""
    return int(part.stop - part.start)


def matrix_part(leaf: Leaf, shard: WeightShard, per: tuple[int, int], dest: Index) -> TensorPart:
    """Returns a shard's part of a tensor with one element per `per` = (rows, columns)."""
    (rows, of_rows), (cols, of_cols) = shard.rows.groups(per[0]), shard.cols.groups(per[1])
    shape, source = (rows, cols), (of_rows, of_cols)
    if leaf.transposed:
        shape, source = shape[::-1], source[::-1]
    part = TensorPart(shape, source, dest, leaf.dtypes, leaf.convert)
    if not leaf.spread:
        return part
    one, convert = slice(0, 1), leaf.convert

    def squeezed(read: torch.Tensor) -> torch.Tensor:
        values = read.squeeze(-1).squeeze(-2)
        return values if convert is None else convert(values)

    return TensorPart((rows, 1, cols, 1), (of_rows, one, of_cols, one), dest, leaf.dtypes, squeezed, other=part)


def largest_usable(name: str, inputs: torch.Tensor) -> torch.Tensor:
    """[1]: of the static scales of one activation. What calibration never reached has none, or a zero. Raises
    UserError."""
    usable = inputs[torch.isfinite(inputs) & (inputs > 0)]
    if usable.numel() == 0:
        raise UserError(f"{name}: no usable input scale; was the checkpoint calibrated?")
    return usable.max().reshape(1)


def quantize_into(scale: torch.Tensor, scheme: Scheme) -> Convert:
    """Makes codes of a 16-bit matrix, or of those of several experts, as it arrives; its scales, one a row, go to
    `scale`."""

    def convert(read: torch.Tensor) -> torch.Tensor:
        if read.ndim > 2:  # one at a time: all at once would need several times their memory
            return torch.stack([quantize_into(rows, scheme)(one) for rows, one in zip(scale, read, strict=True)])
        quantized = quantize(read.to(scale.device), scheme)
        scale.copy_(quantized.scale)
        return quantized.data

    return convert
