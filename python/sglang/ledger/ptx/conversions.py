"""cvt (9.7.9.21): conversions between types, with their roundings and saturation."""

from __future__ import annotations

import numpy as np

from sglang.ledger.ptx.integers import Semantics, as_type
from sglang.ledger.ptx.numbers import (
    bf16_values,
    encode,
    flush,
    halves,
    joined,
    to_bf16,
    to_bf16_exactly,
    values_of,
)
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import SIGNED, TYPES, UNSIGNED, Array, Opcode, Type

_ROUND_TO_INTEGERS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_PAIRS = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")


def convert(op: Opcode) -> Semantics:
    """Returns what computes a cvt. Raises Unsupported."""
    source, target = op.type(), op.type()
    rounding = op.take("rn", "rz", "rm", "rp", "rna", "rs", *_ROUND_TO_INTEGERS)
    flushes, finite = op.take("ftz") != "", op.take("satfinite") != ""
    relu, saturates = op.take("relu") != "", op.take("sat") != ""
    op.end()
    if saturates and (source.name, target.name, rounding, flushes) == ("f32", "f32", "", False):
        return Semantics(_saturated, (32,), (32,))
    if relu or saturates or (rounding in ("rs", "rm", "rp") and target.name != "ue8m0x2"):
        raise Unsupported(op.text)
    if target.name in ("bf16x2", "f16x2") and source.name == "f32":
        if rounding != "rn" or finite:
            raise Unsupported(op.text)
        narrow = _narrow_f32(target.name.removesuffix("x2"))
        return Semantics(lambda a, b: joined(narrow(b.view(np.float32)), narrow(a.view(np.float32))), (32, 32), (32,))
    if target.name in _PAIRS:
        return _to_pair(op, source, target, finite, rounding)
    if source.name in (*_PAIRS, "ue8m0x2"):
        return _from_pair(op, source, target, rounding)
    if target.name == "tf32":
        if rounding not in ("rna", "rn") or source.name != "f32":
            raise Unsupported(op.text)
        return Semantics(lambda a: _to_tf32(a, rounding), (32,), (32,))
    floats = ("f", "bf")
    if source.kind in floats and target.kind in floats:
        return _between_floats(op, source, target, rounding, flushes)
    if source.kind in floats:
        return _to_integer(op, source, target, rounding, flushes)
    if target.kind in floats:
        if rounding not in ("rn", "rz"):
            raise Unsupported(op.text)
        return _from_integer(op, source, target, rounding)
    return Semantics(lambda a: _extended(as_type(source, a), target), (source.bits,), (target.bits,))


def _saturated(a: Array) -> Array:
    """To the numbers from 0 to 1; NaN becomes 0."""
    x = a.view(np.float32)
    return np.where(x != x, np.float32(0), np.clip(x, 0, 1)).astype(np.float32).view(np.uint32)


def _extended(x: Array, target: Type) -> Array:
    """Returns integers with the target's size: cut, or extended by the sign of the source's type."""
    signed = SIGNED if x.dtype.kind == "i" else UNSIGNED
    return x.astype(signed[target.bits]).view(UNSIGNED[target.bits])


def _narrow_f32(name: str):  # type: ignore[no-untyped-def]
    if name == "bf16":
        return to_bf16
    return lambda x: x.astype(np.float16).view(np.uint16)


def _widen(kind: Type, x: Array) -> Array:
    return bf16_values(x) if kind.kind == "bf" else x.view(kind.numpy)


def _between_floats(op: Opcode, source: Type, target: Type, rounding: str, flushes: bool) -> Semantics:
    def run(a: Array) -> Array:
        x = _widen(source, as_type(source, a))
        if flushes and x.dtype == np.float32:
            x = flush(x)
        if rounding in _ROUND_TO_INTEGERS:
            x = _ROUND_TO_INTEGERS[rounding](x)
        if target.kind == "bf":
            if rounding == "rz":
                return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            return to_bf16_exactly(x) if x.dtype == np.float64 else to_bf16(x.astype(np.float32))
        return x.astype(target.numpy).view(UNSIGNED[target.bits])

    narrows = target.bits < source.bits or (target.bits == source.bits and target != source)
    if (narrows and rounding not in ("rn", "rz")) or (
        rounding == "rz" and (source.name, target.name) != ("f32", "bf16")
    ):
        raise Unsupported(op.text)
    return Semantics(run, (source.bits,), (target.bits,))


def _to_integer(op: Opcode, source: Type, target: Type, rounding: str, flushes: bool) -> Semantics:
    if rounding not in _ROUND_TO_INTEGERS:
        raise Unsupported(op.text)
    info = np.iinfo(target.numpy)

    def run(a: Array) -> Array:
        x = _widen(source, as_type(source, a)).astype(np.float64)
        whole = _ROUND_TO_INTEGERS[rounding](np.where(x != x, 0.0, x))
        # The largest integers of 64 bits are no float64, so what is too large is set afterwards.
        low, high = whole <= float(info.min), whole >= float(info.max)
        safe = np.where(low | high, 0.0, whole).astype(target.numpy)
        return np.where(low, info.min, np.where(high, info.max, safe)).astype(target.numpy).view(UNSIGNED[target.bits])

    return Semantics(run, (source.bits,), (target.bits,))


def _from_integer(op: Opcode, source: Type, target: Type, rounding: str) -> Semantics:
    if rounding == "rz":
        raise Unsupported(op.text)

    def run(a: Array) -> Array:
        x = as_type(source, a)
        if target.kind == "bf":
            if source.bits == 64:
                raise Unsupported(op.text)
            return to_bf16_exactly(x.astype(np.float64))
        return x.astype(target.numpy).view(UNSIGNED[target.bits])

    return Semantics(run, (source.bits,), (target.bits,))


def _to_pair(op: Opcode, source: Type, target: Type, finite: bool, rounding: str) -> Semantics:
    """Two numbers to the halves of d: a is the upper one."""
    if not finite or rounding != "rn":
        raise Unsupported(op.text)
    name = target.name.removesuffix("x2")

    def pack(upper: Array, lower: Array) -> Array:
        high, low = encode(name, upper), encode(name, lower)
        if name == "e2m1":
            return (high << np.uint8(4)) | low
        return (high.astype(np.uint16) << np.uint16(8)) | low

    if source.name == "f32":
        return Semantics(lambda a, b: pack(a.view(np.float32), b.view(np.float32)), (32, 32), (target.bits,))
    if source.name == "f16x2":

        def of_halves(a: Array) -> Array:
            low, high = halves(a)
            return pack(high.view(np.float16), low.view(np.float16))

        return Semantics(of_halves, (32,), (target.bits,))
    raise Unsupported(op.text)


def _from_pair(op: Opcode, source: Type, target: Type, rounding: str) -> Semantics:
    if target.name not in ("f16x2", "bf16x2") or rounding != "rn":
        raise Unsupported(op.text)
    name = source.name.removesuffix("x2")
    table = values_of(name)
    if target.name == "f16x2":
        codes = table.astype(np.float16).view(np.uint16)
    else:
        codes = to_bf16(table.astype(np.float32))
    width, mask = (4, 15) if name == "e2m1" else (8, 255)

    def run(a: Array) -> Array:
        a = as_type(TYPES[source.name], a)
        return joined(codes[a & a.dtype.type(mask)], codes[a >> a.dtype.type(width)])

    return Semantics(run, (source.bits,), (32,))


def _to_tf32(a: Array, rounding: str) -> Array:
    """The lower 13 bits of a tf32 are undefined (9.7.9.21); zeros here."""
    half = np.uint32(0x1000) if rounding == "rna" else np.uint32(0xFFF) + ((a >> np.uint32(13)) & np.uint32(1))
    rounded = (a + half) & np.uint32(0xFFFFE000)
    infinite = (a & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return np.where(infinite, a, rounded)
