"""The weights of one product of all experts, in the layout that the kernels read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from sglang.srt.configs.quant_scheme import PLANE_COLUMNS, Scheme, wants_planes
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.reference import (
    Quantized,
    dequantize,
    expand_scale,
    pack_nibbles,
    unpack_nibbles,
)
from sglang.srt.layers.quantization.zero_points import unpack_scales

ELEMENT_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "e2m1": torch.uint8}
SCALE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
UNQUANTIZED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLANE = 16
"""Columns of a plane of reordered four-bit weights: their nibbles are at the same place of 16 32-bit words."""
PLANES = 8
assert PLANE * PLANES == PLANE_COLUMNS
PAIR_PLANES = 4
PAIR_BITS = ((9, 2, 1, 0), (13, 6, 5, 4), (3, 12, 11, 10), (15, 8, 7, 14))
"""The bits of an e2m1 code in a plane of pairs: where its sign, two exponent bits and mantissa bit lie in a half of
the word.
One shift (of plane 2 a rotation, for which the halves exchange their signs) takes them to those of two bfloat16."""
EXCHANGED_SIGNS = 2
MAX_EXPONENT = 152
"""The limit of e8m0 scales in planes of pairs, 2**25: kernels add to the exponents of four at once
(`scaled_dot.LIFTED_SCALES`),
which must not touch one another. No weight is so large; what nobody stored and nobody reads may be anything."""
ZERO_BYTE = {"int4": 0x88, "e2m1": 0}
"""A byte of two zero nibbles."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights [E, N, K] of one product, out = x @ w^T, and what belongs to them. All tensors contiguous.

    `data` [E, N, K], or uint8 [E, N, K / 2] with two columns to a byte, the even one in the low bits, as published; or,
    after `repack`, int32 [E, N, K' / 8] with `plane_cols` = K, where K' is K padded with zeros to a multiple of 128:
    bits 4i to 4i + 3 of word j of each 16 words hold column 16 i + j of 128, or, of mxfp4, `PAIR_BITS[i]` of its halves
    columns 32 i + 2 j and the next. `scale` [E, *scheme.scale_shape(N, K)] (K'
    once repacked) in the scheme's dtype (e8m0 as uint8), or of int4 groups with zero points int16: words of both
    (`quantization/zero_points.py`); `global_scale` [E] fp32; `input_scale` [1] or [E] fp32, a
    static scale of the activations; `bias` [E, N]. w13 has the gate's rows before up's. Where `ep_size` groups of ranks
    have experts of their own, about one of so many pairs names an expert of this one.
    Raises UserError when the tensors do not make up the scheme.
    """

    data: torch.Tensor
    scheme: Scheme | None = None
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    plane_cols: int | None = None
    ep_size: int = 1
    row_of_expert: torch.Tensor | None = None
    """[experts of the layer] int32: the rows of the tensors where experts are, of those that a step needs; None: their
    numbers."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            name = "unquantized" if self.scheme is None else self.scheme.name
            raise UserError(f"expert weights ({name}): {problem}")

    @property
    def num_experts(self) -> int:
        """Returns the number of the layer's experts that this rank has."""
        return self.data.shape[0] if self.row_of_expert is None else len(self.row_of_expert)

    @property
    def zero_points(self) -> bool:
        """Returns whether the scales are words that also hold zero points."""
        return self.scale is not None and self.scale.dtype == torch.int16

    @property
    def rows(self) -> int:
        """Returns N, the outputs of the product."""
        return self.data.shape[1]

    @property
    def cols(self) -> int:
        """Returns K, the inputs of the product."""
        return self._stored_cols if self.plane_cols is None else self.plane_cols

    @property
    def _stored_cols(self) -> int:
        if self.scheme is None or self.scheme.bits == 8:
            return self.data.shape[2]
        return self.data.shape[2] * self.data.element_size() * 2

    def dequantized(self, expert: int) -> torch.Tensor:
        """Returns an expert's weights [N, K] in fp32, exact, without the bias."""
        if self.scheme is None:
            return self.data[expert].float()
        assert self.scale is not None
        data = self.data[expert] if self.plane_cols is None else _from_planes(self.data[expert], self.scheme)
        if self.zero_points:
            return _with_zero_points(data, self.scale[expert], self.scheme)[:, : self.cols]
        factor = None if self.global_scale is None else self.global_scale[expert]
        return dequantize(Quantized(data, self.scale[expert], factor), self.scheme)[:, : self.cols]

    def _problems(self) -> list[str]:
        """Returns what is wrong with the tensors, the most telling first."""
        if self.data.ndim != 3:
            return [f"data must be [experts, rows, columns], not {list(self.data.shape)}"]
        if self.scheme is None:
            stray = self.scale is not None or self.global_scale is not None
            return [
                *([f"no dtype {self.data.dtype}"] if self.data.dtype not in UNQUANTIZED_DTYPES else []),
                *(["has scales, but no scheme"] if stray else []),
            ]
        wanted = ELEMENT_DTYPES[self.scheme.element] if self.plane_cols is None else torch.int32
        if self.data.dtype != wanted:
            return [f"data must be {wanted}, not {self.data.dtype}"]
        return self._scale_problems(self.scheme)

    def _scale_problems(self, scheme: Scheme) -> list[str]:
        wanted = torch.int16 if self.zero_points and scheme.element == "int4" else SCALE_DTYPES[scheme.scale]
        shape = (len(self.data), *scheme.scale_shape(self.rows, self._stored_cols))
        if self.scale is None:
            return ["has no scale"]
        problems = []
        if self.scale.dtype != wanted:
            problems.append(f"scale must be {wanted}, not {self.scale.dtype}")
        if tuple(self.scale.shape) != shape:
            problems.append(f"scale must be {list(shape)}, not {list(self.scale.shape)}")
        if scheme.global_scale != (self.global_scale is not None):
            problems.append("needs a global scale" if scheme.global_scale else "takes no global scale")
        if self.global_scale is not None and tuple(self.global_scale.shape) != (len(self.data),):
            problems.append(f"global_scale must be [{len(self.data)}], not {list(self.global_scale.shape)}")
        return problems


Waves: TypeAlias = Iterable[tuple[ExpertWeights, ExpertWeights, torch.Tensor]]
"""Parts of a step's pairs: the weights of both products, and ids [T, k] that are -1 for pairs of other parts. Where it
begins with a part, its weights are on their way."""


def _with_zero_points(data: torch.Tensor, words: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns [N, K] fp32 of codes uint8 [N, K / 2] and the words of their groups."""
    scale, zeros = unpack_scales(words)
    codes = unpack_nibbles(data).float()
    scale, zeros = (expand_scale(part, scheme, *codes.shape) for part in (scale, zeros))
    return (codes - zeros) * scale


def repack(weights: ExpertWeights, features: Collection[str], device: torch.device | None = None) -> ExpertWeights:
    """Returns the weights in the layout that kernels need on a GPU with these features (of ArchTraits). May reorder in
    place. device: computes the new order of weights that lie elsewhere.

    Four-bit weights that are unpacked in registers are reordered into planes (see ExpertWeights), so that one shift and
    mask gives weights of neighbouring columns, with one scale per row. Weights that tensor cores read packed stay
    unchanged. Static input scales per expert become the largest one, because x is quantized once for all experts.
    """
    scheme, input_scale = weights.scheme, weights.input_scale
    if input_scale is not None:
        input_scale = input_scale.float().max().reshape(1)
    weights = dataclasses.replace(weights, input_scale=input_scale)
    if scheme is None or weights.plane_cols is not None or not wants_planes(scheme, features):
        return weights
    assert weights.scale is not None
    padding = -weights.cols % PLANE_COLUMNS
    data, scale = weights.data, weights.scale
    if _in_pairs(scheme):
        scale.clamp_(max=MAX_EXPONENT)
    if padding:
        data = F.pad(data, (0, padding // 2), value=ZERO_BYTE[scheme.element])
        groups = scheme.scale_shape(weights.rows, weights.cols + padding)[1]
        scale = F.pad(scale.view(_bytes_of(scale)), (0, groups - scale.shape[-1])).view(scale.dtype)
    experts = () if data.is_meta else data  # nothing to reorder; 256 experts would take a rehearsal a minute
    for expert in experts:  # one at a time: all at once would need several times their memory
        expert.copy_(_to_planes(expert.to(device), scheme))
    return dataclasses.replace(weights, data=data.view(torch.int32), scale=scale, plane_cols=weights.cols)


def _bytes_of(scale: torch.Tensor) -> torch.dtype:
    """Returns an integer dtype of the same size, because not every torch pads float8."""
    return torch.int16 if scale.element_size() == 2 else torch.uint8


def _in_pairs(scheme: Scheme) -> bool:
    """Returns whether planes hold pairs of columns, like `scaled_dot.in_pairs`."""
    return scheme.element == "e2m1" and scheme.group == (1, 32)


def _to_planes(packed: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns packed weights uint8 [N, K / 2], K a multiple of 128, reordered into planes of the same shape."""
    codes = unpack_nibbles(packed)
    if _in_pairs(scheme):
        return _to_planes_of_pairs(codes)
    codes = codes.unflatten(-1, (-1, PLANES, PLANE))
    # Bytes of a word from its lowest bits on: planes 0 and 1, 2 and 3, ...
    return (codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)).transpose(-1, -2).flatten(-3)


def _from_planes(words: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns planes int32 [N, K / 8] as published, uint8 [N, K / 2]."""
    if _in_pairs(scheme):
        return pack_nibbles(_from_planes_of_pairs(words))
    pairs = words.view(torch.uint8).unflatten(-1, (-1, PLANE, PLANES // 2)).transpose(-1, -2)
    return pack_nibbles(torch.stack((pairs & 15, pairs >> 4), -2).flatten(-4))


def _to_planes_of_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes uint8 [N, K] as planes of pairs, uint8 [N, K / 2]."""
    planes = codes.to(torch.int32).unflatten(-1, (-1, PAIR_PLANES, PLANE, 2))
    words = torch.zeros_like(planes[..., 0, :, :])  # [N, strips, words, halves]
    for plane, places in enumerate(PAIR_BITS):
        pair = planes[..., plane, :, :]
        for bit, place in enumerate(reversed(places)):
            exchanged = pair.flip(-1) if plane == EXCHANGED_SIGNS and bit == 3 else pair
            words |= (exchanged >> bit & 1) << place
    return words.to(torch.uint16).view(torch.uint8).flatten(-3)


def _from_planes_of_pairs(words: torch.Tensor) -> torch.Tensor:
    """Returns planes of pairs int32 [N, K / 8] as codes uint8 [N, K]."""
    halves = words.view(torch.uint16).to(torch.int32).unflatten(-1, (-1, PLANE, 2))
    planes = []
    for plane, places in enumerate(PAIR_BITS):
        bits = [(halves >> place & 1) << bit for bit, place in enumerate(reversed(places))]
        if plane == EXCHANGED_SIGNS:
            bits[3] = bits[3].flip(-1)
        planes.append(bits[0] | bits[1] | bits[2] | bits[3])
    return torch.stack(planes, -3).to(torch.uint8).flatten(-4)
