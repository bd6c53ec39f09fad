"""Quantization in plain torch: the reference for kernels, checkpoints and the exporter.

Values are exact: `dequantize` returns fp32 products of what is stored, `quantize` rounds to nearest, ties to even.
Sources: OCP Microscaling Formats (MX) v1.0; NVIDIA's NVFP4 (blocks of 16, e4m3 scales, one fp32 factor per matrix).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of codes 0 to 7; bit 3 is the sign."""
E8M0_BIAS = 127
_TINY = 1e-12
_SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Quantized:
    """A quantized matrix. `data` [..., N, K] (e4m3, int8) or [..., N, K / 2] (uint8, two per byte, even columns in the
    low bits); `scale` [..., *Scheme.scale_shape(N, K)] (e8m0 as uint8); `global_scale` [...] fp32 or None."""

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None


def quantize(weight: torch.Tensor, scheme: Scheme, global_scale: torch.Tensor | None = None) -> Quantized:
    """Quantizes weight [..., N, K]; if a group has one row, K must be a multiple of its columns. `global_scale` [...]
    is given if several weights share it."""
    w = weight.float()
    if scheme.scale == "e8m0":
        return quantize_by(w, scheme, _mx_scale(w, scheme))
    if scheme.global_scale:
        factor = _over(w.abs().amax((-1, -2)), E4M3_MAX * E2M1_MAX) if global_scale is None else global_scale
        return _quantize_nvfp4(w, factor)
    limit = {"e4m3": E4M3_MAX, "int8": 127.0, "int4": 7.5}[scheme.element]
    scale = _over(_group_amax(w, scheme), limit).clamp_min(_TINY)
    if scheme.scale in _SIXTEEN_BITS:
        scale = scale.to(_SIXTEEN_BITS[scheme.scale])
    return quantize_by(w, scheme, scale)


def quantize_by(
    weight: torch.Tensor, scheme: Scheme, scale: torch.Tensor, global_scale: torch.Tensor | None = None
) -> Quantized:
    """Quantizes weight [..., N, K] to the nearest values with scales in the form that is stored."""
    step = expand_scale(decoded_scale(scale, scheme), scheme, *weight.shape[-2:])
    if global_scale is not None:
        step = step * global_scale[..., None, None]
    values = (weight.float() / step).masked_fill_(step == 0, 0.0)
    return Quantized(_encode(values, scheme.element), scale, global_scale)


def decoded_scale(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns stored scales as fp32 numbers."""
    return decode_e8m0(scale) if scheme.scale == "e8m0" else scale.float()


def nearest(values: torch.Tensor, element: str) -> torch.Tensor:
    """Returns the nearest values of an element type, fp32."""
    if element == "int4":
        return values.round().clamp(-8, 7)
    if element == "e2m1":
        return decode_e2m1(encode_e2m1(values))
    return _decode(_encode(values, element), element)


def dequantize(q: Quantized, scheme: Scheme) -> torch.Tensor:
    """Returns [..., N, K] fp32."""
    values = _decode(q.data, scheme.element)
    rows, cols = values.shape[-2:]
    values = values * expand_scale(decoded_scale(q.scale, scheme), scheme, rows, cols)
    return values if q.global_scale is None else values * q.global_scale.float()[..., None, None]


def round_activation(x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x [T, K] in fp32 after quantizing it by the scheme and back, as the product sees it. `input_scale`: a
    static scale of one value (fp8_tensor), or nvfp4's global factor; without it the tensor's largest value determines
    it."""
    kind, values = scheme.activation, x.float()
    if kind is None:
        return values
    if kind == "mxfp8":
        return _round_by(values, SCHEMES["mxfp8"])
    if kind == "nvfp4":
        factor = _over(values.abs().amax(), E4M3_MAX * E2M1_MAX)
        return dequantize(
            _quantize_nvfp4(values, factor if input_scale is None else input_scale.float()), SCHEMES["nvfp4"]
        )
    group = {"tensor": (0, 0), "token": (1, 0), "group128": (1, 128)}[kind]
    as_weight = Scheme("activation", scheme.element, group, "float32", None)
    if input_scale is None:
        return _round_by(values, as_weight)
    return _decode(_encode(values / input_scale.float(), scheme.element), scheme.element) * input_scale.float()


def expand_scale(scale: torch.Tensor, scheme: Scheme, rows: int, cols: int) -> torch.Tensor:
    """Returns stored scales in a shape that broadcasts over [..., rows, cols]."""
    per_row, per_col = scheme.group
    if per_row == 0:
        return scale[..., None, None]
    if per_col == 0:
        return scale[..., None]
    if per_row > 1:
        scale = scale.repeat_interleave(per_row, -2)[..., :rows, :]
    return scale.repeat_interleave(per_col, -1)[..., :cols]


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Returns uint8 exponents with bias 127 as fp32; 255 is NaN."""
    exact = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - E8M0_BIAS)
    return torch.where(scale == 255, torch.nan, exact)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Returns e2m1 codes 0 to 15 (uint8) of fp32 values: round to nearest, ties to the even code, saturating at 6."""
    magnitude = values.abs().clamp_max(E2M1_MAX)
    # Between neighbours the step is 0.5 below 2, 1 below 4, then 2: round in units of it (torch rounds ties to even).
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / step) * step
    code = torch.bucketize(rounded, torch.tensor(E2M1_VALUES, device=values.device)).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes 0 to 15 as fp32."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.int()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes [..., K] of 0 to 15 into [..., K / 2] uint8, even columns in the low bits."""
    return codes[..., 0::2].to(torch.uint8) | (codes[..., 1::2].to(torch.uint8) << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks [..., K / 2] uint8 into codes [..., K] uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _over(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Returns x / divisor, bitwise equal on all devices: with a Python number torch multiplies by the reciprocal on a
    GPU."""
    return x / torch.full((), divisor, device=x.device)


def _encode(values: torch.Tensor, element: str) -> torch.Tensor:
    if element == "e4m3":
        return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    if element == "int8":
        return values.round().clamp(-127, 127).to(torch.int8)
    if element == "int4":
        return pack_nibbles(values.round().clamp(-8, 7).to(torch.int8) + 8)
    return pack_nibbles(encode_e2m1(values))


def _decode(data: torch.Tensor, element: str) -> torch.Tensor:
    if element == "int4":
        return unpack_nibbles(data.view(torch.uint8)).float() - 8.0
    if element == "e2m1":
        return decode_e2m1(unpack_nibbles(data.view(torch.uint8)))
    return data.float()


def _round_by(values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return dequantize(quantize(values, scheme), scheme)


def _group_amax(w: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    per_row, per_col = scheme.group
    magnitude = w.abs()
    if per_row == 0:
        return magnitude.amax((-1, -2))
    if per_col == 0:
        return magnitude.amax(-1)
    rows, cols = w.shape[-2:]
    padded = torch.nn.functional.pad(magnitude, (0, -cols % per_col, 0, -rows % per_row))
    return padded.unflatten(-1, (-1, per_col)).unflatten(-3, (-1, per_row)).amax((-1, -3))


def _mx_scale(w: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns e8m0 scales. An exponent is the largest value's minus the element format's largest. Of e4m3 it is one
    more where the largest value would be above 448: in four bits that would cost more than it saves."""
    largest_exponent = {"e2m1": 2, "e4m3": 8}[scheme.element]
    mantissa, exponent = torch.frexp(_group_amax(w, scheme).clamp_min(2.0**-126))
    exponent = exponent - 1 - largest_exponent
    if scheme.element == "e4m3":
        exponent = exponent + (mantissa > E4M3_MAX / 512).int()
    return (exponent + E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def _quantize_nvfp4(w: torch.Tensor, global_scale: torch.Tensor) -> Quantized:
    scheme = SCHEMES["nvfp4"]
    factor = global_scale.clamp_min(_TINY)
    scale = _encode(_over(_group_amax(w, scheme), E2M1_MAX) / factor[..., None, None], "e4m3")
    return quantize_by(w, scheme, scale, factor)
