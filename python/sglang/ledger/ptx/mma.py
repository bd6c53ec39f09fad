"""mma.sync (9.7.14.5): which thread holds which element, and the product.

For all types of 32, 16, 8 and 4 bits the layouts (9.7.14.5.1 to 9.7.14.5.13) follow from one rule, where a register
holds e elements, g is a thread's place among eight (its lane / 4) and t its place among four (its lane % 4):

- register r of A has row g + 8 * (r % 2) and the columns e * t + 4 * e * (r / 2), and the next ones;
- register r of B has column g and the rows e * t + 4 * e * r, and the next ones;
- the accumulators are rows g, g, g + 8, g + 8 and columns 2 * t, 2 * t + 1, 2 * t, 2 * t + 1.

Sums are exact (float64), and rounded to the accumulator's type once per instruction; hardware may cut intermediate
sums, which the ISA leaves open (9.7.14.5.14).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang.ledger.ptx.numbers import bf16_values, values_of
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import Array, Opcode

_SHAPE = re.compile(r"m16n8k(\d+)$")
_BITS = {"tf32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "e2m1": 4}
_DEPTHS = {32: (4, 8), 16: (8, 16), 8: (16, 32), 4: (64,)}
_SCALES = {
    ("mxf8f6f4", "1X"): "ue8m0",
    ("mxf4", "2X"): "ue8m0",
    ("mxf4nvf4", "2X"): "ue8m0",
    ("mxf4nvf4", "4X"): "ue4m3",
}
LANE = np.arange(32)


@dataclass(frozen=True, slots=True)
class Product:
    """A form of mma.sync."""

    depth: int
    a: str
    b: str
    c: str
    d: str
    kind: str = ""
    scales: int = 0
    """Along K, for each row of A and column of B."""
    scale_type: str = ""
    saturates: bool = False
    """Integer sums keep to the limits of 32 bits (.satfinite) instead of wrapping."""

    @property
    def bits(self) -> int:
        """Of an element's place in a register: kinds of mixed formats give each eight (9.7.14.5.9)."""
        return 8 if self.kind in ("f8f6f4", "mxf8f6f4") else _BITS[self.a]


def product(op: Opcode) -> Product:
    """Reads an opcode of mma.sync. Raises Unsupported."""
    text = op.text
    op.need("sync"), op.need("aligned"), op.need("row"), op.need("col")
    kind, scale_vec = "", ""
    for modifier in list(op.modifiers):
        if modifier.startswith("kind::"):
            kind = op.take(modifier).removeprefix("kind::")
        if modifier.startswith("scale_vec::"):
            scale_vec = op.take(modifier).removeprefix("scale_vec::")
    shape = _SHAPE.match(op.modifiers.pop(0))
    scaled = op.take("block_scale") != ""
    saturates = op.take("satfinite") != ""
    if shape is None:
        raise Unsupported(text)
    depth = int(shape[1])
    scale_type = op.modifiers.pop() if scaled else ""
    if len(op.modifiers) != 4:
        raise Unsupported(text)
    d, a, b, c = op.modifiers
    if scaled:
        scale_vec = scale_vec or {"mxf8f6f4": "1X", "mxf4": "2X"}.get(kind, "")
        if _SCALES.get((kind, scale_vec)) != scale_type:
            raise Unsupported(text)
    narrow = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
    if kind in ("f8f6f4", "mxf8f6f4"):
        known = a in narrow and b in narrow and depth == 32
    elif kind in ("mxf4", "mxf4nvf4"):
        known = a == b == "e2m1" and depth == 64
    else:
        known = not kind and a in _BITS and a != "e2m1" and _BITS.get(b) == _BITS[a] and depth in _DEPTHS[_BITS[a]]
        known = known and (a in ("s8", "u8")) == (d == "s32")
    if not known or c != d or d not in ("f32", "f16", "s32"):
        raise Unsupported(text)
    return Product(depth, a, b, c, d, kind, int(scale_vec[0]) if scaled else 0, scale_type, saturates)


@functools.cache
def places_of_a(depth: int, elements: int) -> tuple[Array, Array]:
    """Returns row and column of each element of A: [lane, register, place in the register]."""
    registers = depth // (4 * elements) * 2
    r, i = np.arange(registers)[None, :, None], np.arange(elements)[None, None, :]
    g, t = (LANE // 4)[:, None, None], (LANE % 4)[:, None, None]
    rows, columns = g + 8 * (r % 2) + 0 * i, elements * t + 4 * elements * (r // 2) + i
    return rows, columns


@functools.cache
def places_of_b(depth: int, elements: int) -> tuple[Array, Array]:
    """Returns row and column of each element of B: [lane, register, place in the register]."""
    registers = depth // (4 * elements)
    r, i = np.arange(registers)[None, :, None], np.arange(elements)[None, None, :]
    g, t = (LANE // 4)[:, None, None], (LANE % 4)[:, None, None]
    return elements * t + 4 * elements * r + i, g + 0 * r + 0 * i


@functools.cache
def places_of_c() -> tuple[Array, Array]:
    """Returns row and column of each accumulator: [lane, accumulator]."""
    i = np.arange(4)[None, :]
    return (LANE // 4)[:, None] + 8 * (i // 2), 2 * (LANE % 4)[:, None] + i % 2


@functools.cache
def _flat(which: str, depth: int, elements: int) -> Array:
    """Returns for each element of a matrix, row by row, which of a warp's values it is."""
    if which == "c":
        rows, columns = places_of_c()
        width, height = 8, 16
    elif which == "a":
        rows, columns = places_of_a(depth, elements)
        width, height = depth, 16
    else:
        rows, columns = places_of_b(depth, elements)
        width, height = 8, depth
    order = np.empty(width * height, dtype=np.int64)
    order[(rows * width + columns).ravel()] = np.arange(width * height)
    return order


@functools.cache
def _order_of_c() -> Array:
    """Returns for each of a warp's accumulators which element of the matrix it is, row by row."""
    return np.argsort(_flat("c", 0, 0))


@functools.cache
def _decoder(name: str, bits: int) -> Callable[[Array], Array]:
    """Returns what makes float64 of codes."""
    if name == "bf16":
        return lambda x: bf16_values(x).astype(np.float64)
    if name == "f16":
        return lambda x: x.view(np.float16).astype(np.float64)
    if name == "tf32":  # the lower 13 bits are not read
        return lambda x: (x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name == "s8":
        return lambda x: x.view(np.int8).astype(np.float64)
    if name == "u8":
        return lambda x: x.astype(np.float64)
    table = values_of(name)
    if name == "e2m1" and bits == 8:  # in the middle of its byte (9.7.14.5.9)
        return lambda x: table[(x >> np.uint8(2)) & np.uint8(15)]
    if name in ("e2m3", "e3m2"):
        return lambda x: table[x & np.uint8(63)]
    return lambda x: table[x]


def elements_of(registers: list[Array], bits: int) -> Array:
    """Returns the elements of registers [lanes] as [warps, 32 * registers * elements], lower bits first."""
    count, lanes = len(registers), registers[0].size
    words = np.empty((lanes, count), dtype=np.uint32)
    for i, register in enumerate(registers):
        words[:, i] = register
    if bits == 4:
        packed = words.view(np.uint8)
        codes = np.empty((*packed.shape, 2), dtype=np.uint8)
        codes[..., 0], codes[..., 1] = packed & np.uint8(15), packed >> np.uint8(4)
        return codes.reshape(lanes // 32, -1)
    kind = {32: np.uint32, 16: np.uint16, 8: np.uint8}[bits]
    return words.view(kind).reshape(lanes // 32, -1)


def matrix(which: str, form: Product, registers: list[Array]) -> Array:
    """Returns A or B of each warp in float64."""
    bits = form.bits
    name = form.a if which == "a" else form.b
    values = _decoder(name, bits)(elements_of(registers, bits))
    shape = (16, form.depth) if which == "a" else (form.depth, 8)
    return values[:, _flat(which, form.depth, 32 // bits)].reshape(-1, *shape)


def scale_factors(which: str, form: Product, data: Array, byte: int, thread: int) -> Array:
    """Returns the scales of each warp (9.7.14.3): [warps, 16, scales] of A's rows, [warps, scales, 8] of B's columns.
    Of four neighbouring threads two hold those of A's rows g and g + 8, one that of B's column g."""
    lanes = data.reshape(-1, 32)
    codes = np.ascontiguousarray(lanes).view(np.uint8).reshape(-1, 32, 4)[:, :, byte : byte + form.scales]
    table = values_of(form.scale_type)
    values = table[codes & np.uint8(len(table) - 1)]  # ue4m3 has seven bits; the eighth is not read
    g = np.arange(8)
    if which == "a":
        rows = np.concatenate([4 * g + 2 * thread, 4 * g + 2 * thread + 1])
        return values[:, rows]
    return values[:, 4 * g + thread].transpose(0, 2, 1)


def multiply(
    form: Product, a: list[Array], b: list[Array], c: list[Array], scales: tuple[Array, Array] | None = None
) -> list[Array]:
    """Returns the registers of D = A * B + C for all warps."""
    left, right = matrix("a", form, a), matrix("b", form, b)
    if scales is not None:
        part = form.depth // form.scales
        left = left * np.repeat(scales[0], part, axis=2)
        right = right * np.repeat(scales[1], part, axis=1)
    total = np.matmul(left, right) + _accumulators(form, c)
    out = total.reshape(-1, 128)[:, _order_of_c()]
    if form.d == "s32":
        if form.saturates:
            out = np.clip(out, -(2.0**31), 2.0**31 - 1)
        words = out.astype(np.int64).astype(np.uint64).astype(np.uint32)
    elif form.d == "f32":
        words = out.astype(np.float32).view(np.uint32)
    else:
        return _halves_of(out)
    return [np.ascontiguousarray(words.reshape(-1, 4)[:, i]) for i in range(4)]


def _accumulators(form: Product, c: list[Array]) -> Array:
    if form.c == "f16":
        values = elements_of(c, 16).view(np.float16).astype(np.float64)
    else:
        words = elements_of(c, 32)
        values = words.view(np.int32 if form.c == "s32" else np.float32).astype(np.float64)
    return values[:, _flat("c", 0, 0)].reshape(-1, 16, 8)


def _halves_of(out: Array) -> list[Array]:
    words = out.astype(np.float16).reshape(-1, 4).view(np.uint32)
    return [np.ascontiguousarray(words[:, i]) for i in range(2)]
