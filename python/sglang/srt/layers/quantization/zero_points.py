"""Scales of four-bit groups and their zero points in one word of 16 bits, as the experts' products read them.

A code q of 0 to 15 stands for (q - z) s. s needs 12 bits of the word, z the other four: so a group with a zero point
takes as many bytes as one without, and no load more. s is bfloat16 without its sign and with the lowest five bits of
the exponent: numbers below 4, of 8 significant bits down to 2**-29 and of fewer down to 2**-36. No group of weights
has larger ones, whose weights would reach 60.
"""

from __future__ import annotations

import torch

from sglang.srt.errors import UserError

ZERO_BITS = 4
SCALE_RANGE = 2.0**97
"""Twelve bits, as the lowest of a bfloat16's exponent and mantissa, are the scale divided by this."""
SCALE_END = 4.0
"""Scales are below."""


def pack_scales(name: str, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Returns words (int16) of scales and of zero points 0 to 15 of the same shape. Raises UserError for scales that no
    word holds, of the weights `name`."""
    scale = scale.bfloat16()
    if not bool(((scale >= 0) & (scale < SCALE_END)).all()):
        raise UserError(
            f"{name}: a group with a zero point has a scale that is negative, not a number, or {SCALE_END:g} or more."
            " Was the checkpoint damaged? Quantize the model anew."
        )
    bits = (scale.float() / SCALE_RANGE).bfloat16().view(torch.int16)
    return bits << ZERO_BITS | zeros.to(torch.int16)


def unpack_scales(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fp32 scales and zero points of words (int16)."""
    bits = words >> ZERO_BITS & 0xFFF
    return bits.view(torch.bfloat16).float() * SCALE_RANGE, (words & 15).float()
