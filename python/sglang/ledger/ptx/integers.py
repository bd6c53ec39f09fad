"""Integer arithmetic, logic and shifts (9.7.1, 9.7.8), selection and comparison (9.7.6, 9.7.7).

A `Rule` makes of an opcode what computes it: a function from registers' contents to the result's, and the sizes of its
operands in bits (1: a predicate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.ledger.ptx.numbers import bf16_values
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import SIGNED, UNSIGNED, Array, Opcode, Type


@dataclass(frozen=True, slots=True)
class Semantics:
    """`run` takes a numpy array for each source and returns the result's (a tuple where there are several)."""

    run: Callable[..., Any]
    sources: tuple[int, ...]
    results: tuple[int, ...]


Rule = Callable[[Opcode], Semantics]


def as_type(kind: Type, x: Array) -> Array:
    """Returns a register's content as an instruction's type sees it; a wider register is cut (9.4.1)."""
    if x.dtype.itemsize * 8 > kind.bits:
        x = x.astype(UNSIGNED[kind.bits])
    return x.view(SIGNED[kind.bits]) if kind.kind == "s" else x


def _binary(function: Callable[[Array, Array], Array]) -> Rule:
    def rule(op: Opcode) -> Semantics:
        kind = op.type()
        op.end()
        if kind.kind == "s":
            signed, unsigned = SIGNED[kind.bits], UNSIGNED[kind.bits]
            return Semantics(
                lambda a, b: function(a.view(signed), b.view(signed)).view(unsigned), (kind.bits,) * 2, (kind.bits,)
            )
        size = 1 if kind.kind == "p" else kind.bits
        return Semantics(function, (size, size), (size,))

    return rule


def _unary(function: Callable[[Array], Array]) -> Rule:
    def rule(op: Opcode) -> Semantics:
        kind = op.type()
        op.end()
        size = 1 if kind.kind == "p" else kind.bits
        if kind.kind == "s":
            signed, unsigned = SIGNED[kind.bits], UNSIGNED[kind.bits]
            return Semantics(lambda a: function(a.view(signed)).view(unsigned), (size,), (size,))
        return Semantics(function, (size,), (size,))

    return rule


def _wide(x: Array, kind: Type) -> Array:
    """Returns the values with twice the bits."""
    return x.view(SIGNED[kind.bits]).astype(SIGNED[2 * kind.bits]) if kind.kind == "s" else x.astype(
        UNSIGNED[2 * kind.bits]
    )  # fmt: skip


def _high(a: Array, b: Array, kind: Type) -> Array:
    if kind.bits == 64:
        wide = [int(x) * int(y) >> 64 for x, y in np.broadcast(*(x.view(kind.numpy) for x in (a, b)))]
        return np.array([x & (1 << 64) - 1 for x in wide], dtype=np.uint64)
    bits = kind.bits
    return (_wide(a, kind) * _wide(b, kind) >> _wide(a, kind).dtype.type(bits)).astype(UNSIGNED[bits])


def multiply(op: Opcode) -> Semantics:
    """mul.lo, mul.hi, mul.wide (9.7.1.3) and mad (9.7.1.4) of integers."""
    kind = op.type()
    part = op.need("lo", "hi", "wide")
    op.end()
    bits = kind.bits
    if part == "wide":
        unsigned = UNSIGNED[2 * bits]

        def product(a: Array, b: Array) -> Array:
            return (_wide(a, kind) * _wide(b, kind)).view(unsigned)

        result = 2 * bits
    elif part == "lo":

        def product(a: Array, b: Array) -> Array:
            return a * b

        result = bits
    else:

        def product(a: Array, b: Array) -> Array:
            return _high(a, b, kind)

        result = bits
    if op.name == "mul":
        return Semantics(product, (bits, bits), (result,))
    return Semantics(lambda a, b, c: product(a, b) + c, (bits, bits, result), (result,))


def _divide(a: Array, b: Array) -> Array:
    """Integers, towards zero; what is divided by zero is undefined (9.7.1.8): all ones, as machines give it."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        quotient = a // safe
        quotient = quotient + ((a - quotient * safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, ~np.zeros_like(b), quotient)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - _divide(a, b) * b)


def shift(op: Opcode) -> Semantics:
    """shl, shr (9.7.8.7, 9.7.8.8): amounts of the size and more give zeros, or the sign."""
    kind = op.type()
    op.end()
    bits = kind.bits
    unsigned = UNSIGNED[bits]

    def left(a: Array, b: Array) -> Array:
        if b.size == 1:
            amount = int(b[0])
            return a << unsigned(amount) if amount < bits else np.zeros_like(a)
        return np.where(b < bits, a << np.minimum(b, bits - 1).astype(unsigned), unsigned(0))

    def right(a: Array, b: Array) -> Array:
        amount = np.minimum(b, bits - 1).astype(unsigned)
        if kind.kind == "s":
            return (a.view(SIGNED[bits]) >> amount.view(SIGNED[bits])).view(unsigned)
        return np.where(b < bits, a >> amount, unsigned(0)) if b.size > 1 or int(b[0]) >= bits else a >> amount

    return Semantics(left if op.name == "shl" else right, (bits, 32), (bits,))


def funnel(op: Opcode) -> Semantics:
    """shf.l, shf.r (9.7.8.9): 64 bits of two registers, shifted."""
    side, mode = op.need("l", "r"), op.need("wrap", "clamp")
    op.type()
    op.end()

    def run(low: Array, high: Array, amount: Array) -> Array:
        n = (amount & np.uint32(31) if mode == "wrap" else np.minimum(amount, 32)).astype(np.uint64)
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return (both << n >> np.uint64(32) if side == "l" else both >> n).astype(np.uint32)

    return Semantics(run, (32, 32, 32), (32,))


def bit_field(op: Opcode) -> Semantics:
    """bfe (9.7.1.17): `length` bits from `start` on; the sign is that of the field's, or the number's, last bit."""
    kind = op.type()
    op.end()
    bits = kind.bits
    unsigned, signed = UNSIGNED[bits], SIGNED[bits]

    def run(a: Array, start: Array, length: Array) -> Array:
        first, count = start.astype(np.int64) & 255, length.astype(np.int64) & 255
        last = np.minimum(first + count - 1, bits - 1)
        kept = np.clip(last - first + 1, 0, bits)
        up = np.where(kept > 0, bits - 1 - last, 0).astype(unsigned)
        moved = a << up
        down = np.clip(bits - kept, 0, bits - 1).astype(unsigned)
        if kind.kind == "u":
            return np.where(kept > 0, moved >> down, unsigned(0))
        fill = (a >> np.clip(last, 0, bits - 1).astype(unsigned)) & unsigned(1)
        inside = (moved.view(signed) >> down.view(signed)).view(unsigned)
        return np.where(count == 0, unsigned(0), np.where(kept > 0, inside, unsigned(0) - fill))

    return Semantics(run, (bits, 32, 32), (bits,))


def insert(op: Opcode) -> Semantics:
    """bfi (9.7.1.18)."""
    bits = op.type().bits
    op.end()
    unsigned = UNSIGNED[bits]

    def run(a: Array, b: Array, start: Array, length: Array) -> Array:
        first, count = start.astype(np.int64) & 255, length.astype(np.int64) & 255
        ones = np.where(count >= bits, -1, (1 << np.minimum(count, bits - 1)) - 1).astype(np.int64)
        at = np.minimum(first, bits - 1).astype(unsigned)
        mask = np.where(first < bits, ones.astype(unsigned) << at, unsigned(0))
        return (b & ~mask) | ((a << at) & mask)

    return Semantics(run, (bits, bits, 32, 32), (bits,))


def permute(op: Opcode) -> Semantics:
    """prmt (9.7.9.7): each byte of the result is one of eight, or its sign eight times."""
    op.need("b32")
    op.end()

    def run(a: Array, b: Array, selector: Array) -> Array:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        out = np.zeros(1, np.uint32)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = ((both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(
                np.uint32
            )
            signs = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            out = out | (np.where(choice & np.uint32(8), signs, byte).astype(np.uint32) << np.uint32(8 * i))
        return out

    return Semantics(run, (32, 32, 32), (32,))


def look_up(op: Opcode) -> Semantics:
    """lop3 (9.7.8.6): any function of three bits, as a table of eight."""
    op.need("b32")
    op.end()

    def run(a: Array, b: Array, c: Array, table: Array) -> Array:
        out = np.zeros(1, np.uint32)
        for i in range(8):
            if int(table[0]) >> i & 1:
                out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return out

    return Semantics(run, (32, 32, 32, 32), (32,))


def count(op: Opcode) -> Semantics:
    """popc, clz (9.7.1.13, 9.7.1.14)."""
    bits = op.type().bits
    op.end()
    name = op.name

    def run(a: Array) -> Array:
        if name == "popc":
            return np.bitwise_count(a).astype(np.uint32)
        for step in (1, 2, 4, 8, 16, 32):  # all bits below the first one are set
            if step < bits:
                a = a | (a >> a.dtype.type(step))
        return (bits - np.bitwise_count(a)).astype(np.uint32)

    return Semantics(run, (bits,), (32,))


def reverse(op: Opcode) -> Semantics:
    """brev (9.7.1.16)."""
    bits = op.type().bits
    op.end()

    def run(a: Array) -> Array:
        out = np.zeros_like(a)
        for i in range(bits):
            out |= ((a >> a.dtype.type(i)) & a.dtype.type(1)) << a.dtype.type(bits - 1 - i)
        return out

    return Semantics(run, (bits,), (bits,))


def select(op: Opcode) -> Semantics:
    """selp (9.7.6.3)."""
    bits = op.type().bits
    op.end()
    return Semantics(lambda a, b, p: np.where(p, a, b), (bits, bits, 1), (bits,))


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip


def floats_of(kind: Type, x: Array) -> Array:
    """Returns a register's content as numbers."""
    if kind.kind == "bf":
        return bf16_values(x)
    return x.view(kind.numpy)


def compare(op: Opcode) -> Semantics:
    """setp (9.7.6.2, 9.7.7.2), also combined with a predicate. Unordered comparisons hold for NaN, and "ne" does not,
    which numpy's does."""
    kind = op.type()
    flushes = op.take("ftz") != ""
    logic = op.take("and", "or", "xor")
    floating = kind.kind in ("f", "bf")
    name = op.need(*_COMPARE, "num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu")
    op.end()

    def test(a: Array, b: Array) -> Array:
        if not floating:
            return _COMPARE[name](as_type(kind, a), as_type(kind, b))
        x, y = floats_of(kind, a), floats_of(kind, b)
        if flushes:
            from sglang.ledger.ptx.numbers import flush

            x, y = flush(x), flush(y)
        if name in ("num", "nan"):
            unordered = (x != x) | (y != y)
            return unordered if name == "nan" else ~unordered
        if name in _COMPARE:
            holds = _COMPARE[name](x, y)
            return holds & (x == x) & (y == y) if name == "ne" else holds
        return _COMPARE[name.removesuffix("u")](x, y) | (x != x) | (y != y)

    bits = kind.bits
    if logic:
        join = _LOGIC[logic]
        return Semantics(lambda a, b, p: join(test(a, b), p), (bits, bits, 1), (1,))
    return Semantics(test, (bits, bits), (1,))


def _packed16(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def run(a: Array, b: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        return function(np.ascontiguousarray(a).view(np.uint16), np.ascontiguousarray(b).view(np.uint16)).view(
            np.uint32
        )

    return run


def add_packed(op: Opcode) -> Semantics:
    """add.u16x2, add.s16x2 (9.7.1.1)."""
    op.need("u16x2", "s16x2")
    op.end()
    return Semantics(_packed16(np.add), (32, 32), (32,))


def copy(op: Opcode) -> Semantics:
    """mov (9.7.9.3) of one register to another of its size."""
    kind = op.type()
    op.end()
    size = 1 if kind.kind == "p" else kind.bits
    return Semantics(lambda a: a, (size,), (size,))


def absolute(op: Opcode) -> Semantics:
    """abs of signed integers (9.7.1.11)."""
    return _unary(np.abs)(op)


INTEGERS: dict[str, Rule] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": multiply,
    "mad": multiply,
    "div": _binary(_divide),
    "rem": _binary(_remainder),
    "min": _binary(np.minimum),
    "max": _binary(np.maximum),
    "abs": absolute,
    "neg": _unary(np.negative),
    "and": _binary(np.bitwise_and),
    "or": _binary(np.bitwise_or),
    "xor": _binary(np.bitwise_xor),
    "not": _unary(np.invert),
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "bfe": bit_field,
    "bfi": insert,
    "prmt": permute,
    "lop3": look_up,
    "popc": count,
    "clz": count,
    "brev": reverse,
    "selp": select,
    "setp": compare,
    "mov": copy,
}


def integer(op: Opcode) -> Semantics:
    """Returns what computes the opcode. Raises Unsupported."""
    if op.modifiers and op.modifiers[-1] in ("u16x2", "s16x2") and op.name == "add":
        return add_packed(op)
    if op.name not in INTEGERS:
        raise Unsupported(op.text)
    return INTEGERS[op.name](op)
