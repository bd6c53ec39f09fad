"""Floating-point formats in numpy: bfloat16, and the narrow ones of matrix instructions, by their bits.

All roundings here are to the nearest, ties to even, unless a name says otherwise. Values are float32 or float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sglang.ledger.ptx.types import Array


@dataclass(frozen=True, slots=True)
class Format:
    """A narrow format (5.2.3): bits of exponent and fraction; what has no sign; how NaN and infinity are written."""

    exponent: int
    fraction: int
    bias: int
    infinities: bool = False
    nan: int | None = None
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.fraction


FORMATS = {
    "e4m3": Format(4, 3, 7, nan=0x7F),
    "e5m2": Format(5, 2, 15, infinities=True, nan=0x7F),
    "e2m3": Format(2, 3, 1),
    "e3m2": Format(3, 2, 3),
    "e2m1": Format(2, 1, 1),
    "ue8m0": Format(8, 0, 127, nan=0xFF, signed=False),
    "ue4m3": Format(4, 3, 7, nan=0x7F, signed=False),
}


@functools.cache
def values_of(name: str) -> Array:
    """Returns the value of every code of a format, as float64."""
    form = FORMATS[name]
    values = np.empty(1 << form.bits)
    for code in range(1 << form.bits):
        magnitude = code & ((1 << (form.exponent + form.fraction)) - 1)
        exponent, fraction = magnitude >> form.fraction, magnitude & ((1 << form.fraction) - 1)
        top = (1 << form.exponent) - 1
        if form.nan is not None and magnitude == form.nan:
            value = np.nan
        elif form.infinities and exponent == top:
            value = np.nan if fraction else np.inf
        elif exponent == 0 and form.signed | (form.fraction > 0):
            value = fraction * 2.0 ** (1 - form.bias - form.fraction)
        else:
            value = (1 + fraction / (1 << form.fraction)) * 2.0 ** (exponent - form.bias)
        negative = form.signed and code >> (form.bits - 1)
        values[code] = -value if negative else value
    return values


@functools.cache
def _magnitudes(name: str) -> tuple[Array, Array]:
    """Returns the finite values of a format from 0 on, and the limits between neighbours."""
    form = FORMATS[name]
    half = values_of(name)[: 1 << (form.bits - form.signed)]
    finite = half[np.isfinite(half)]
    return finite, (finite[1:] + finite[:-1]) / 2


def encode(name: str, x: Array) -> Array:
    """Returns the codes nearest to x, ties to even codes; too large ones become the largest finite one (.satfinite),
    NaN the format's NaN (the largest, if it has none: 9.7.9.21)."""
    form = FORMATS[name]
    finite, limits = _magnitudes(name)
    magnitude = np.abs(x.astype(np.float64))
    below = np.searchsorted(limits, magnitude, side="left")
    above = np.searchsorted(limits, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above)  # they differ on a limit only: the even one
    codes = np.minimum(codes, len(finite) - 1).astype(np.uint8)
    if form.signed:
        codes = np.where(np.signbit(x), codes | np.uint8(1 << (form.bits - 1)), codes)
    nan = np.isnan(x)
    if nan.any():
        code = form.nan if form.nan is not None else len(finite) - 1
        codes = np.where(nan, np.uint8(code), codes)
    return codes.astype(np.uint8)


def bf16_values(bits: Array) -> Array:
    """uint16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """float32 -> the bits of the nearest bfloat16; NaN becomes 0x7FFF, as the hardware's conversions give it."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = x != x
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFF), rounded)
    return rounded.astype(np.uint16)


def to_bf16_exactly(x: Array) -> Array:
    """float64 -> the bits of the nearest bfloat16, in one rounding."""
    return to_bf16(to_f32_odd(x))


def to_f32_odd(x: Array) -> Array:
    """float64 -> float32, rounded to odd: a further rounding to a narrower type then is as if there had been one."""
    near = x.astype(np.float32)
    exact = near.astype(np.float64) == x
    towards_zero = np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    odd = (towards_zero.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(exact | (x != x), near, odd)


def sum_to_f32(product: Array, addend: Array) -> Array:
    """Returns product + addend (float64) in one rounding to float32, for products that float64 has exactly."""
    total = product + addend
    if total.shape == ():
        total = total.reshape(1)
    bits = total.view(np.uint64) & np.uint64(0x1FFFFFFF)
    near = np.abs(total) < 2.0**-125
    doubtful = (bits == np.uint64(0x10000000)) | (near & (bits != 0))
    if doubtful.any():
        # What float64 rounded off decides: the sum is rounded to odd, so that float32 rounds what it was.
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        towards = np.nextafter(total, np.where(error > 0.0, np.inf, -np.inf))
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        total = np.where(np.isfinite(total) & (error != 0.0) & even, towards, total)
    return total.astype(np.float32)


def flush(x: Array) -> Array:
    """float32: numbers below the normal ones become zeros with their sign (.ftz)."""
    bits = x.view(np.uint32)
    small = (bits & np.uint32(0x7F800000)) == 0
    if small.any():
        return np.where(small, bits & np.uint32(0x80000000), bits).view(np.float32)
    return x


def halves(x: Array) -> tuple[Array, Array]:
    """uint32 -> its lower and upper 16 bits."""
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def joined(low: Array, high: Array) -> Array:
    """The lower and the upper 16 bits -> uint32."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
