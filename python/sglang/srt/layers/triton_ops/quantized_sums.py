"""The codec of sums that travel as e4m3 (`distributed/quantized_sums`, whose TorchCodec is the reference, bit for bit),
for collectives of a library: one launch before they are sent, between and behind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LAUNCH = {"GROUPS": 64, "num_warps": 4}
"""2,048 values a program."""
SIZE = 32
"""Values of a group: quantized_sums.GROUP."""

_SIZE = tl.constexpr(SIZE)
_NO_NUMBERS = tl.constexpr(255)


@triton.jit
def _store_encoded(values, message, rank, share, place, inside):
    """Values [GROUPS, 32] in fp32 -> their bytes at `place` of the share of `rank`, and their scales behind the share's
    values."""
    # Without the sign the bits of what is no number are larger than any number's.
    largest = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1)
    exponent = largest >> 23
    scale = tl.maximum(exponent - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    scale = tl.where(exponent == 255, _NO_NUMBERS, scale)
    inverse = (tl.maximum(254 - scale, 0) << 23).to(tl.float32, bitcast=True)
    encoded = (values * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    begin = message + rank * share * (_SIZE + 1)
    cols = tl.arange(0, _SIZE)
    tl.store(begin[:, None] + place[:, None] * _SIZE + cols, encoded, mask=inside[:, None])
    tl.store(begin + share * _SIZE + place, scale.to(tl.uint8), mask=inside)


@triton.jit
def _load_decoded(message, rank, share, place, inside):
    """fp32 [GROUPS, 32]; zeros where nothing is inside."""
    begin = message + rank * share * (_SIZE + 1)
    cols = tl.arange(0, _SIZE)
    encoded = tl.load(begin[:, None] + place[:, None] * _SIZE + cols, mask=inside[:, None], other=0)
    scale = tl.load(begin + share * _SIZE + place, mask=inside, other=1).to(tl.int32)
    power = (scale << 23).to(tl.float32, bitcast=True)
    power = tl.where(scale == _NO_NUMBERS, float("nan"), power)
    return encoded.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power[:, None]


@triton.jit
def encode_kernel(x, message, num_groups, share, ranks, GROUPS: tl.constexpr):
    """x [num_groups * 32] -> message [ranks, share * 33]."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _SIZE + tl.arange(0, _SIZE)
    values = tl.load(x + at, mask=(group < num_groups)[:, None], other=0.0).to(tl.float32)
    _store_encoded(values, message, group // share, share, group % share, group < share * ranks)


@triton.jit
def decode_kernel(message, out, num_groups, share, GROUPS: tl.constexpr):
    """Message [ranks, share * 33] -> out [num_groups * 32]."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < num_groups
    values = _load_decoded(message, group // share, share, group % share, inside)
    tl.store(out + group[:, None] * _SIZE + tl.arange(0, _SIZE), values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def add_kernel(message, out, num_groups, share, ranks, ENCODES: tl.constexpr, GROUPS: tl.constexpr):
    """Summands [ranks, share * 33] of one share -> out: their sum in the order of the ranks, encoded [share * 33] or
    rounded [num_groups * 32]."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < num_groups
    total = tl.zeros((GROUPS, _SIZE), tl.float32)
    first = tl.zeros((GROUPS,), tl.int64)
    for rank in range(ranks):
        total += _load_decoded(message, first + rank, share, group, inside)
    if ENCODES:
        _store_encoded(total, out, first, share, group, inside)
    else:
        at = group[:, None] * _SIZE + tl.arange(0, _SIZE)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None])


class TritonCodec:
    """Implements `quantized_sums.Codec` for contiguous values in 16 bits."""

    def encode(self, x: torch.Tensor, message: torch.Tensor) -> None:
        ranks, share = _shares(message)
        encode_kernel[_grid(ranks * share)](x, message, x.numel() // SIZE, share, ranks, **LAUNCH)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        num_groups = out.numel() // SIZE
        decode_kernel[_grid(num_groups)](message, out, num_groups, _shares(message)[1], **LAUNCH)

    def add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._add(message, out, out.numel() // SIZE, encodes=False)

    def add_encoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        self._add(message, total, _shares(message)[1], encodes=True)

    def _add(self, message: torch.Tensor, out: torch.Tensor, num_groups: int, encodes: bool) -> None:
        ranks, share = _shares(message)
        add_kernel[_grid(num_groups)](message, out, num_groups, share, ranks, ENCODES=encodes, **LAUNCH)


def _shares(message: torch.Tensor) -> tuple[int, int]:
    """Returns a message's ranks, and the groups of each rank's share."""
    return message.shape[0], message.shape[1] // (SIZE + 1)


def _grid(num_groups: int) -> tuple[int]:
    return (triton.cdiv(num_groups, LAUNCH["GROUPS"]),)
