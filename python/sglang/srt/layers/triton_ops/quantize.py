"""Activations to the number formats that quantized products take. Reference: `quantization.reference.round_activation`.

Quotients are rounded to nearest, so that scales and values are those of the reference bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.layers.triton_ops import pdl

Launch = dict[str, int]

GROUP_LAUNCH: dict[int, Launch] = {
    128: {"PAIRS": 16, "num_warps": 4},
    32: {"PAIRS": 64, "num_warps": 4},
    16: {"PAIRS": 128, "num_warps": 4},
}
"""Launches by group size: 2,048 elements a program."""
FLAT_LAUNCH: Launch = {"BLOCK": 4096, "num_warps": 8}
_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_LIMITS = {"e4m3": 448.0, "int8": 127.0}
_TINY = tl.constexpr(1e-12)


@triton.jit
def _round_to(values, out):
    """fp32 that round to no more than the limits of out's type -> that type, ties to even. Quotients by a scale that
    was made of the largest of them are such."""
    if out.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits for a fraction; `.to` alone would truncate.
        return ((values + 12582912.0) - 12582912.0).to(tl.int8)
    return values.to(out.dtype.element_ty)


@triton.jit
def quotient(values, step, inverse):
    """values / step rounded to nearest, for fp32 `values` with the 8 or 11 significant bits of bf16 and fp16 and
    `inverse` = 1 / step rounded to nearest. Exact unless it is too small for e4m3 and int8 to tell it from zero. A
    division is 20 instructions and a branch for each element, and took longer than the memory; this is three. Source:
    P. W. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990."""
    nearly = values * inverse
    return tl.math.fma(tl.math.fma(-nearly, step, values), inverse, nearly)


@triton.jit
def _clamp(values, limit):
    """NaN stays NaN: it must reach the logits, where it ends the request."""
    values = tl.maximum(values, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(values, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values):
    """The largest magnitude of each row of fp32 values, NaN if one is: without the sign its bits are larger than any
    number's."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(values):
    """fp32 -> codes 0 to 15 (int32): to nearest, ties to the even code, saturating at 6."""
    m = tl.abs(values)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    sign = (values.to(tl.int32, bitcast=True) >> 31) & 1
    return code | (sign << 3)


@triton.jit
def row_kernel(x, data, scale, row_stride, size, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One scale a row: program t quantizes row t of x [T, K] -> data [T, K], scale [T] fp32."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values)), limit), _TINY)
    rounded = _round_to(quotient(values, step, tl.math.div_rn(1.0, step)), data)
    tl.store(data + row * size + cols, rounded, mask=inside)
    tl.store(scale + row, step)


@triton.jit
def group_kernel(
    x,  # [T, K]
    data,  # [T, K], nvfp4: [T, K / 2] uint8
    scale,  # [T, ceil(K / GROUP)]: fp32, mxfp8 uint8, nvfp4 e4m3
    factor,  # nvfp4: [1] fp32
    row_stride,
    size,
    num_groups,
    num_pairs,
    KIND: tl.constexpr,  # "group128", "mxfp8", "nvfp4"
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One scale for GROUP columns of a row. A pair is (row, group): number row * num_groups + group."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row = (pair // num_groups).to(tl.int64)
    col = (pair % num_groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    there = pair < num_pairs
    inside = there[:, None] & (col < size)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row[:, None] * row_stride + col, mask=inside, other=0.0).to(tl.float32)
    largest = _largest(values)
    if KIND == "group128":
        step = tl.maximum(tl.math.div_rn(largest, 448.0), _TINY, propagate_nan=tl.PropagateNan.ALL)
        values = quotient(values, step[:, None], tl.math.div_rn(1.0, step)[:, None])
        tl.store(data + row[:, None] * size + col, _round_to(values, data), mask=inside)
        tl.store(scale + pair, step, mask=there)
    elif KIND == "mxfp8":
        # The least power of two that brings the largest value to 448 or below: 1.75 times 2^8. Biased as fp32's.
        bits = largest.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        values = _clamp(values * inverse[:, None], 448.0)
        tl.store(data + row[:, None] * size + col, _round_to(values, data), mask=inside)
        tl.store(scale + pair, exponent.to(tl.uint8), mask=there)
    else:
        whole = tl.maximum(tl.load(factor), _TINY)
        step = tl.math.div_rn(tl.math.div_rn(largest, 6.0), whole)
        step = tl.minimum(step, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        both = step.to(tl.float32) * whole
        # A group of (nearly) zeros has a scale of zero, and zeros for values.
        divisor = tl.where(both > 0.0, both, 1.0)
        # Quotients of infinity, and of what overflows, would be NaN, for which e2m1 has no code.
        values = _clamp(values, 6.0 * divisor[:, None])
        values = quotient(values, divisor[:, None], tl.math.div_rn(1.0, divisor)[:, None])
        values = tl.where(both[:, None] > 0.0, values, 0.0)
        low, high = tl.split(tl.reshape(encode_e2m1(values), (PAIRS, GROUP // 2, 2)))
        byte = (pair % num_groups * (GROUP // 2))[:, None] + tl.arange(0, GROUP // 2)[None, :]
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(data + row[:, None] * (size // 2) + byte, packed, mask=there[:, None])
        tl.store(scale + pair, step, mask=there)


@triton.jit
def amax_kernel(x, amax, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """amax [1] fp32, zero before: the largest magnitude of x [T, K]. Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * row_stride + cols, mask=cols < size, other=0.0).to(tl.float32)
    tl.atomic_max(amax, tl.max(tl.abs(values)))


@triton.jit
def tensor_kernel(
    x, data, scale, amax, row_stride, size, limit, DYNAMIC: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One scale for all of x [T, K]: read from `scale` [1], or made from `amax` [1] and written there."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if DYNAMIC:
        step = tl.maximum(tl.math.div_rn(tl.load(amax), limit), _TINY)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, step)
    else:
        step = tl.load(scale)
    values = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    values = _clamp(values, limit * step)  # before: a quotient that overflows is NaN
    rounded = _round_to(quotient(values, step, tl.math.div_rn(1.0, step)), data)
    tl.store(data + row * size + cols, rounded, mask=inside)


def quantize_activation(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] with contiguous rows -> (data, scale) as `scheme.activation` says.

    "token": e4m3 or int8 [T, K], fp32 [T]. "tensor": e4m3 [T, K], fp32 [1]; `input_scale` [1] fp32 is a static scale.
    "group128": e4m3 [T, K], fp32 [T, ceil(K / 128)]. "mxfp8": e4m3 [T, K], uint8 exponents [T, K / 32]. "nvfp4": uint8
    [T, K / 2], e4m3 [T, K / 16]; `input_scale` [1] fp32 is the factor of the whole (needed). No host synchronization.
    """
    assert x.ndim == 2 and x.stride(1) == 1, f"x must have contiguous rows, has strides {x.stride()}"
    kind = scheme.activation
    if kind == "token":
        return _by_row(x, scheme.element)
    if kind == "tensor":
        return _by_tensor(x, scheme.element, input_scale)
    if kind in ("group128", "mxfp8", "nvfp4"):
        return _by_group(x, kind, input_scale)
    raise ValueError(f"scheme {scheme.name} leaves activations in 16 bits")


def row_launch(size: int) -> Launch:
    """Returns the launch parameters of `row_kernel` for rows of `size` elements."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 1), 16)}


def _by_row(x: torch.Tensor, element: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = x.shape
    data = torch.empty((num_rows, size), dtype=_ELEMENTS[element], device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        row_kernel[(num_rows,)](
            x, data, scale, x.stride(0), size, _LIMITS[element], **row_launch(size), **pdl.options()
        )
    return data, scale


def _by_tensor(x: torch.Tensor, element: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = x.shape
    data = torch.empty((num_rows, size), dtype=_ELEMENTS[element], device=x.device)
    grid = (num_rows, triton.cdiv(size, FLAT_LAUNCH["BLOCK"]))
    amax = scale = input_scale
    if input_scale is None:
        scale = torch.empty(1, dtype=torch.float32, device=x.device)
        amax = torch.zeros(1, dtype=torch.float32, device=x.device)
        if num_rows:
            amax_kernel[grid](x, amax, x.stride(0), size, **FLAT_LAUNCH, **pdl.options())
    assert scale is not None
    if num_rows:
        tensor_kernel[grid](
            x,
            data,
            scale,
            amax,
            x.stride(0),
            size,
            _LIMITS[element],
            DYNAMIC=input_scale is None,
            **FLAT_LAUNCH,
            **pdl.options(),
        )
    return data, scale


_GROUPS = {
    "group128": (128, torch.float8_e4m3fn, torch.float32),
    "mxfp8": (32, torch.float8_e4m3fn, torch.uint8),
    "nvfp4": (16, torch.uint8, torch.float8_e4m3fn),
}


def _by_group(x: torch.Tensor, kind: str, input_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = x.shape
    group, data_type, scale_type = _GROUPS[kind]
    assert kind == "group128" or size % group == 0, f"{kind} needs a multiple of {group} columns, not {size}"
    assert kind != "nvfp4" or input_scale is not None, "nvfp4 needs the activation's global factor"
    num_groups = triton.cdiv(size, group)
    data = torch.empty((num_rows, size // 2 if kind == "nvfp4" else size), dtype=data_type, device=x.device)
    scale = torch.empty((num_rows, num_groups), dtype=scale_type, device=x.device)
    launch = GROUP_LAUNCH[group]
    grid = (triton.cdiv(num_rows * num_groups, launch["PAIRS"]),)
    if num_rows:
        group_kernel[grid](
            x,
            data,
            scale,
            scale if input_scale is None else input_scale,
            x.stride(0),
            size,
            num_groups,
            num_rows * num_groups,
            KIND=kind,
            GROUP=group,
            **launch,
            **pdl.options(),
        )
    return data, scale
