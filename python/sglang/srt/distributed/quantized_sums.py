"""Sums over ranks whose summands and totals travel as e4m3, with a scale for each 32 values: half of the bytes.

    x of each rank -> encoded -> all-to-all: each rank has all summands of its share of the values
                   -> decoded and added in fp32 in the order of the ranks -> encoded -> all-gather -> decoded

A scale is a power of two, the least with which the largest value of its group is at most 448, e4m3's largest. So
dividing and multiplying by it is exact, and all that is lost is lost in two roundings to e4m3. Every rank decodes the
same bytes of a total: all have the same bits. Totals do not depend on how values are shared out or cut into pieces, so
that the library's collectives and sgl-kernel's kernel (csrc/quantized_sum.cuh) give the same bits, too.

Error of a rounding: at most 1/16 of the value, or 2**-17 of the largest of its group where that is more. A group with
an infinity or no number gives no numbers. `error_bound` is the bound of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

GROUP = 32
"""Values with one scale."""
WIRE = GROUP + 1
"""Bytes of a group: its values, its scale."""
RELATIVE_ERROR, GROUP_ERROR = 2.0**-4, 2.0**-17
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NO_NUMBERS = 255
"""The scale of a group that is not finite."""
_ALIGNED = 16
"""Groups of a share in multiples of so many begin on 16 bytes."""


class Codec(Protocol):
    """Converts values to bytes and back. A message is uint8 [ranks, share * WIRE]: for each rank the values of `share`
    groups, then their scales."""

    def encode(self, x: torch.Tensor, message: torch.Tensor) -> None:
        """Encodes x [N], N a multiple of GROUP, into the message; groups behind the last become zeros."""

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes the message into out [N]."""

    def add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Sums the ranks' partial sums of one share in fp32 into out [N], rounded to its dtype; groups behind N are
        left out."""

    def add_encoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Sums as `add`, but encodes the total as a message of one share, uint8 [1, share * WIRE]."""


def _scales(values: torch.Tensor) -> torch.Tensor:
    """Returns the scale exponents plus 127 as uint8 [...] of fp32 values [..., GROUP]."""
    bits = values.abs().amax(-1).view(torch.int32)
    exponent = bits >> 23
    scale = (exponent - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1)  # 448 is 1.75 times 2**8
    return scale.masked_fill(exponent == 255, _NO_NUMBERS).to(torch.uint8)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 powers of two that the scales stand for."""
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    return powers.masked_fill(scales == _NO_NUMBERS, torch.nan)


def _encoded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (e4m3 values as uint8 [..., GROUP], scales uint8 [...]) of fp32 values [..., GROUP]."""
    scales = _scales(values)
    inverse = ((254 - scales.to(torch.int32)).clamp(min=0) << 23).view(torch.float32)
    return (values * inverse[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scales


def _parts(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a message [ranks, share * WIRE]: values [ranks, share, GROUP] and scales [ranks, share]."""
    share = message.shape[1] // WIRE
    return message[:, : share * GROUP].unflatten(1, (share, GROUP)), message[:, share * GROUP :]


class TorchCodec:
    """The reference codec in plain torch."""

    def encode(self, x: torch.Tensor, message: torch.Tensor) -> None:
        values, scales = _parts(message)
        ranks, share = scales.shape
        groups = x.new_zeros((ranks * share, GROUP), dtype=torch.float32)
        groups[: x.numel() // GROUP] = x.view(-1, GROUP)
        encoded, powers = _encoded(groups)
        values.copy_(encoded.view_as(values))
        scales.copy_(powers.view_as(scales))

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        decoded = _decoded(message).flatten()
        out.copy_(decoded[: out.numel()])

    def add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_added(message).flatten()[: out.numel()])

    def add_encoded(self, message: torch.Tensor, total: torch.Tensor) -> None:
        values, scales = _parts(total)
        encoded, powers = _encoded(_added(message))
        values[0].copy_(encoded)
        scales[0].copy_(powers)


def _decoded(message: torch.Tensor) -> torch.Tensor:
    """Returns the message's values, fp32 [ranks, share, GROUP]."""
    values, scales = _parts(message)
    return values.contiguous().view(torch.float8_e4m3fn).float() * _powers(scales.contiguous())[..., None]


def _added(message: torch.Tensor) -> torch.Tensor:
    """Returns the sum in rank order, fp32 [share, GROUP]."""
    total = torch.zeros(message.shape[1] // WIRE, GROUP, device=message.device)
    for partial_sum in _decoded(message):
        total += partial_sum
    return total


def error_bound(partial_sums: torch.Tensor) -> torch.Tensor:
    """Returns the bound fp64 [N] of the error of a quantized sum of partial_sums fp64 [ranks, N], N a multiple of
    GROUP. It does not cover fp16 overflow and bf16's own rounding."""
    sizes = partial_sums.abs()
    of_group = sizes.unflatten(1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, 1)
    summed = (RELATIVE_ERROR * sizes + GROUP_ERROR * of_group).sum(0)
    total = partial_sums.sum(0).abs() + summed
    largest = total.view(-1, GROUP).amax(-1).repeat_interleave(GROUP)
    roundings = 2.0**-20 * sizes.sum(0) + 2.0**-24  # of fp32 sums, and of what is smaller than 16 bits hold
    return summed + RELATIVE_ERROR * total + GROUP_ERROR * largest + roundings


class PeerSums(Protocol):
    """A kernel that sums quantized values in peers' memory, with the same bits."""

    def can_sum_in_e4m3(self, x: torch.Tensor) -> bool:
        """Returns whether the kernels of peers sum tensors of this type and size in e4m3."""

    def all_reduce_e4m3(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, written over `x`."""


@dataclass(frozen=True, slots=True)
class QuantizedSums:
    """Quantized collectives of a group for large messages: those of at least `least_bytes` and `least_rows`, which all
    ranks decide alike from the shape. The library sends pieces of `piece_bytes`."""

    group: dist.ProcessGroup
    codec: Codec
    least_bytes: int
    least_rows: int
    piece_bytes: int
    peers: PeerSums | None = None

    def covers(self, x: torch.Tensor) -> bool:
        """Returns whether a sum of x [..., rows, H] is quantized."""
        return (
            x.dim() >= 2
            and x.dtype in DTYPES
            and x.shape[-1] % GROUP == 0
            and x.shape[-2] >= self.least_rows
            and x.nbytes >= max(self.least_bytes, 1)
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, written over `x` if it is contiguous."""
        x = x.contiguous()
        if self.peers is not None and self.peers.can_sum_in_e4m3(x):
            return self.peers.all_reduce_e4m3(x)
        for piece in x.view(-1).split(self.piece_bytes // x.element_size()):
            self._sum(piece)
        return x

    def _sum(self, piece: torch.Tensor) -> None:
        """Sums a piece in place."""
        ranks = dist.get_world_size(self.group)
        received = self._exchanged(piece, -(-piece.numel() // (GROUP * ranks * _ALIGNED)) * _ALIGNED)
        total = received.new_empty((1, received.shape[1]))
        self.codec.add_encoded(received, total)
        self.codec.decode(self._gathered(total), piece)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's sum [N, ...] over the ranks' x [ranks, N, ...], which hold a partial sum for each rank.
        The total is rounded once, to x's dtype."""
        out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        received = self._exchanged(x.contiguous().view(-1), out.numel() // GROUP)
        self.codec.add(received, out.view(-1))
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers [N, ...] of each rank into [ranks * N, ...], equal on all ranks: this rank's own part is quantized as
        well."""
        ranks = dist.get_world_size(self.group)
        out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        message = torch.empty((1, x.numel() // GROUP * WIRE), dtype=torch.uint8, device=x.device)
        self.codec.encode(x.contiguous().view(-1), message)
        self.codec.decode(self._gathered(message), out.view(-1))
        return out

    def _exchanged(self, flat: torch.Tensor, share: int) -> torch.Tensor:
        """Returns this rank's share of every rank's values, [ranks, share * WIRE]."""
        message = torch.empty((dist.get_world_size(self.group), share * WIRE), dtype=torch.uint8, device=flat.device)
        self.codec.encode(flat, message)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)
        return received

    def _gathered(self, message: torch.Tensor) -> torch.Tensor:
        gathered = message.new_empty((dist.get_world_size(self.group), message.shape[1]))
        dist.all_gather_into_tensor(gathered, message, group=self.group)
        return gathered
