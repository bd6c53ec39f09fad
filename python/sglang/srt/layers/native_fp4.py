"""Four-bit keys and values in plain torch: the CPU kernels, and the reference for tests.

A row of D numbers is D / 2 bytes of e2m1 codes, the even column in the low bits, and D / 16 bytes of e4m3 scales, one
per 16 columns: the element and block format of NVFP4. The stored value is code * scale * tensor scale.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.quantization.reference import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)

GROUP = 16


def quantize_fp4_rows(x: torch.Tensor, tensor_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [..., D / 2] and scales [..., D / 16], both uint8, of x [..., D]: round to nearest, ties to the
    even code. A scale is the largest magnitude of its group divided by 6; larger values saturate at 448 times 6."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    # Divisors are tensors: by Python numbers a GPU multiplies with the reciprocal.
    six, whole = (torch.full((), value, device=x.device) for value in (E2M1_MAX, tensor_scale))
    scales = (groups.abs().amax(-1) / six / whole).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    divisors = (scales.float() * whole)[..., None]
    quotients = torch.where(divisors > 0, groups / torch.where(divisors > 0, divisors, 1.0), 0.0)
    return pack_nibbles(encode_e2m1(quotients).flatten(-2)), scales.view(torch.uint8)


def dequantize_fp4_rows(codes: torch.Tensor, scales: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """Returns [..., D] fp32 from codes [..., D / 2] and scales [..., D / 16]."""
    values = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (-1, GROUP))
    return (values * scales.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2) * tensor_scale
