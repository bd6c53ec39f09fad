"""Floating-point arithmetic (9.7.3), that of 16-bit types (9.7.4), and of both together (9.7.5).

Results are rounded once, as the ISA has it. Approximate functions are exact here, and so within their bounds, but
where the ISA says what they give instead (div.approx of large divisors).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang.ledger.ptx.integers import Rule, Semantics
from sglang.ledger.ptx.numbers import bf16_values, flush, halves, joined, sum_to_f32, to_bf16, to_bf16_exactly
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import Array, Opcode

_ROUNDINGS = ("rn",)
Function = Callable[..., Array]


def _f32(function: Function, count: int, flushes: bool = False, saturates: bool = False) -> Semantics:
    """Returns what computes float32 from float32."""

    def run(*sources: Array) -> Array:
        values = [x.view(np.float32) for x in sources]
        if flushes:
            values = [flush(x) for x in values]
        result = function(*values).astype(np.float32, copy=False)
        if flushes:
            result = flush(result)
        if saturates:
            result = np.where(result != result, np.float32(0), np.clip(result, 0, 1)).astype(np.float32)
        return result.view(np.uint32)

    if not flushes and not saturates:
        if count == 2:
            return Semantics(
                lambda a, b: function(a.view(np.float32), b.view(np.float32)).view(np.uint32), (32, 32), (32,)
            )
    return Semantics(run, (32,) * count, (32,))


def _fused(a: Array, b: Array, c: Array) -> Array:
    return sum_to_f32(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def _fused_downwards(a: Array, b: Array, c: Array) -> Array:
    """The largest float32 that is not above the sum."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    nearest = sum_to_f32(product, addend)
    wide = nearest.astype(np.float64)
    # What the nearest one is above the sum by, of the larger part first: each difference is exact or its sign is.
    large, small = np.where(np.abs(product) > np.abs(addend), (product, addend), (addend, product))
    above = ((wide - large) - small) > 0
    return np.where(above & np.isfinite(nearest), np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _lesser(a: Array, b: Array) -> Array:
    """The number, if one is NaN; -0 is below +0 (9.7.3.13)."""
    lesser = np.fmin(a, b)
    return np.where((a == 0) & (b == 0) & (np.signbit(a) | np.signbit(b)), a.dtype.type(-0.0), lesser)


def _greater(a: Array, b: Array) -> Array:
    greater = np.fmax(a, b)
    return np.where((a == 0) & (b == 0) & ~(np.signbit(a) & np.signbit(b)), np.abs(greater), greater)


def _or_nan(function: Function) -> Function:
    return lambda a, b: np.where((a != a) | (b != b), a.dtype.type(np.nan), function(a, b))


_BINARY: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": _lesser, "max": _greater}
_COUNTS = {"add": 2, "sub": 2, "mul": 2, "min": 2, "max": 2, "fma": 3, "mad": 3, "neg": 1, "abs": 1}


def arithmetic(op: Opcode) -> Semantics:
    """add, sub, mul, fma, min, max, neg, abs (9.7.3.3 to 9.7.3.14), for all types but mixed ones."""
    if op.modifiers[-2:] in (["f32", "bf16"], ["f32", "f16"]):
        return mixed(op)
    packed = op.take("f32x2", "bf16x2", "f16x2")
    kind = "" if packed else op.type().name
    downwards = op.name == "fma" and kind == "f32" and op.take("rm") != ""
    op.take(*_ROUNDINGS)
    flushes, saturates = op.take("ftz") != "", op.take("sat") != ""
    with_nan = op.take("NaN") != ""
    op.end()
    count = _COUNTS[op.name]
    if op.name in ("neg", "abs"):
        return _sign(op.name, packed or kind)
    if packed == "f32x2":
        return _pairs_of_f32(_fused if op.name == "fma" else _BINARY[op.name], count)
    if kind == "f64":
        return _f64(op.name, count)
    if kind == "f32" and downwards:
        return _f32(_fused_downwards, count, flushes, saturates)
    if kind == "f32":
        function = _fused if op.name in ("fma", "mad") else _BINARY[op.name]
        return _f32(_or_nan(function) if with_nan else function, count, flushes, saturates)
    if saturates or flushes:
        raise Unsupported(op.text)
    if (packed or kind) in ("bf16", "bf16x2"):
        return _narrow(op.name, count, with_nan, packed != "", bf16_values, to_bf16, to_bf16_exactly)
    if (packed or kind) in ("f16", "f16x2"):
        return _narrow(
            op.name, count, with_nan, packed != "",
            lambda x: x.view(np.float16).astype(np.float32),
            lambda x: x.astype(np.float16).view(np.uint16),
            lambda x: x.astype(np.float16).view(np.uint16),
        )  # fmt: skip
    raise Unsupported(op.text)


def _sign(name: str, kind: str) -> Semantics:
    """neg, abs: of the bits."""
    bits, mask = {
        "f32": (32, 0x80000000), "f64": (64, 1 << 63), "bf16": (16, 0x8000), "f16": (16, 0x8000),
        "bf16x2": (32, 0x80008000), "f16x2": (32, 0x80008000),
    }[kind]  # fmt: skip
    if name == "neg":
        return Semantics(lambda a: a ^ a.dtype.type(mask), (bits,), (bits,))
    return Semantics(lambda a: a & ~a.dtype.type(mask), (bits,), (bits,))


def _f64(name: str, count: int) -> Semantics:
    if name == "fma":
        raise Unsupported("fma.f64")
    function = _BINARY[name]
    return Semantics(
        lambda a, b: function(a.view(np.float64), b.view(np.float64)).view(np.uint64), (64,) * count, (64,)
    )


def _pairs_of_f32(function: Function, count: int) -> Semantics:
    def run(*sources: Array) -> Array:
        sources = tuple(np.broadcast_arrays(*sources))
        values = [np.ascontiguousarray(x).view(np.float32) for x in sources]
        return np.ascontiguousarray(function(*values)).view(np.uint64)

    return Semantics(run, (64,) * count, (64,))


def _narrow(
    name: str, count: int, with_nan: bool, packed: bool, widen: Function, narrow: Function, narrow_exact: Function
) -> Semantics:
    """16-bit types: float32 has their sums and products to more than twice the digits, so that rounding it again gives
    the nearest; a fused product needs float64."""

    def one(*sources: Array) -> Array:
        values = [widen(x) for x in sources]
        if name == "fma":
            a, b, c = (x.astype(np.float64) for x in values)
            return narrow_exact(a * b + c)
        function = _or_nan(_BINARY[name]) if with_nan else _BINARY[name]
        return narrow(function(*values))

    if not packed:
        return Semantics(one, (16,) * count, (16,))

    def both(*sources: Array) -> Array:
        parts = [halves(x) for x in sources]
        return joined(one(*(low for low, _ in parts)), one(*(high for _, high in parts)))

    return Semantics(both, (32,) * count, (32,))


def mixed(op: Opcode) -> Semantics:
    """add, sub, fma of 16-bit types with a float32 (9.7.5): fma.rn.f32.bf16 d, a, b, c, where only c is float32."""
    kind = op.type().name
    op.need("f32")
    op.take(*_ROUNDINGS)
    op.end()

    def widen(x: Array) -> Array:
        return bf16_values(x) if kind == "bf16" else x.view(np.float16).astype(np.float32)

    if op.name == "fma":
        return Semantics(
            lambda a, b, c: _fused(widen(a), widen(b), c.view(np.float32)).view(np.uint32), (16, 16, 32), (32,)
        )
    if op.name not in ("add", "sub"):
        raise Unsupported(op.text)
    function = _BINARY[op.name]
    return Semantics(lambda a, c: function(widen(a), c.view(np.float32)).view(np.uint32), (16, 32), (32,))


def _by_float64(function: Function) -> Function:
    return lambda *values: function(*(x.astype(np.float64) for x in values)).astype(np.float32)


def _tanh(x: Array) -> Array:
    return np.tanh(x)


_FUNCTIONS: dict[str, Function] = {
    "ex2": _by_float64(np.exp2),
    "lg2": _by_float64(np.log2),
    "sin": _by_float64(np.sin),
    "cos": _by_float64(np.cos),
    "tanh": _by_float64(_tanh),
    "rcp": _by_float64(lambda x: 1.0 / x),
    "rsqrt": _by_float64(lambda x: 1.0 / np.sqrt(x)),
    "sqrt": _by_float64(np.sqrt),
}


def function(op: Opcode) -> Semantics:
    """ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt (9.7.3.15 to 9.7.3.25) of float32."""
    op.need("f32")
    op.need("approx", "rn")
    flushes = op.take("ftz") != ""
    op.end()
    return _f32(_FUNCTIONS[op.name], 1, flushes)


def divide(op: Opcode) -> Semantics:
    """div (9.7.3.8). div.approx gives 0 for finite numbers by 2**126 and more, and NaN for infinite ones."""
    op.need("f32")
    how = op.need("approx", "full", "rn")
    flushes = op.take("ftz") != ""
    op.end()

    def run(a: Array, b: Array) -> Array:
        quotient = np.divide(a, b)
        if how == "approx":
            large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
            if large.any():
                nothing = np.where(np.isinf(a), np.float32(np.nan), np.float32(0))
                quotient = np.where(large & (a == a), nothing, quotient)
        return quotient

    return _f32(run, 2, flushes)


def copy_sign(op: Opcode) -> Semantics:
    """copysign (9.7.3.2): the sign of a, the number b."""
    op.need("f32")
    op.end()
    sign = np.uint32(0x80000000)
    return Semantics(lambda a, b: (a & sign) | (b & ~sign), (32, 32), (32,))


FLOATS: dict[str, Rule] = {
    **dict.fromkeys(_COUNTS, arithmetic),
    **dict.fromkeys(_FUNCTIONS, function),
    "div": divide,
    "copysign": copy_sign,
}


def is_floating(op: Opcode) -> bool:
    """Returns whether an opcode's last type is one of floating point."""
    last = op.modifiers[-1] if op.modifiers else ""
    return last in ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "f32x2")


def floating(op: Opcode) -> Semantics:
    """Returns what computes the opcode. Raises Unsupported."""
    if op.name not in FLOATS:
        raise Unsupported(op.text)
    return FLOATS[op.name](op)
