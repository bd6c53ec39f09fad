"""mma.sync against the ISA's own words for where each element of a fragment is, written out by shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang.ledger.ptx.mma import multiply, product, scale_factors
from sglang.ledger.ptx.numbers import values_of
from sglang.ledger.ptx.problems import Unsupported
from sglang.ledger.ptx.types import Opcode

Place = Callable[[int, int, int], tuple[int, int]]
"""Row and column of element i, for groupID g and threadID_in_group t."""

A_PLACES: dict[str, Place] = {
    "m16n8k4 32": lambda g, t, i: (g + 8 * i, t),  # 9.7.14.5.5
    "m16n8k8 32": lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),  # 9.7.14.5.7
    "m16n8k8 16": lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),  # 9.7.14.5.7
    "m16n8k16 16": lambda g, t, i: (
        g if 0 <= i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)
    ),  # 9.7.14.5.8
    "m16n8k16 8": lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),  # 9.7.14.5.9
    "m16n8k32 8": lambda g, t, i: (
        g if 0 <= i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)
    ),  # 9.7.14.5.10
    "m16n8k64 4": lambda g, t, i: (
        g if 0 <= i < 8 or 16 <= i < 24 else g + 8, t * 8 + (i & 7) + (0 if i < 16 else 32)
    ),  # 9.7.14.5.11
}  # fmt: skip
B_PLACES: dict[str, Place] = {
    "m16n8k4 32": lambda g, t, i: (t, g),
    "m16n8k8 32": lambda g, t, i: (t + 4 * i, g),
    "m16n8k8 16": lambda g, t, i: (t * 2 + i, g),
    "m16n8k16 16": lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    "m16n8k16 8": lambda g, t, i: (t * 4 + i, g),
    "m16n8k32 8": lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    "m16n8k64 4": lambda g, t, i: (t * 8 + (i & 7) + (0 if i < 8 else 32), g),
}


def c_place(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8, t * 2 + (i & 1))


PLAIN = [
    ("m16n8k4", "f32.tf32.tf32.f32", 32),
    ("m16n8k8", "f32.tf32.tf32.f32", 32),
    ("m16n8k8", "f32.f16.f16.f32", 16),
    ("m16n8k16", "f32.f16.f16.f32", 16),
    ("m16n8k16", "f16.f16.f16.f16", 16),
    ("m16n8k16", "f32.bf16.bf16.f32", 16),
    ("m16n8k16", "s32.s8.s8.s32", 8),
    ("m16n8k32", "s32.s8.u8.s32", 8),
    ("m16n8k32", "f32.e4m3.e4m3.f32", 8),
    ("m16n8k32", "f32.e5m2.e4m3.f32", 8),
    ("m16n8k32", "kind::f8f6f4.f32.e2m1.e4m3.f32", 8),
    ("m16n8k32", "kind::f8f6f4.f32.e3m2.e2m3.f32", 8),
]
SCALED = [
    ("m16n8k32", "kind::mxf8f6f4", "1X", "e4m3", "ue8m0"),
    ("m16n8k32", "kind::mxf8f6f4", "1X", "e2m1", "ue8m0"),
    ("m16n8k64", "kind::mxf4", "2X", "e2m1", "ue8m0"),
    ("m16n8k64", "kind::mxf4nvf4", "2X", "e2m1", "ue8m0"),
    ("m16n8k64", "kind::mxf4nvf4", "4X", "e2m1", "ue4m3"),
]


def codes_and_values(name: str, count: int, rng: np.random.Generator, mixed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Random elements: their bits as they lie in a register, and their values."""
    if name in ("f16", "bf16", "tf32"):
        values = rng.integers(-8, 9, count).astype(np.float32) / 4
        if name == "f16":
            return values.astype(np.float16).view(np.uint16), values
        return (values.view(np.uint32) >> 16 if name == "bf16" else values.view(np.uint32)), values
    if name in ("s8", "u8"):
        codes = rng.integers(0, 256, count).astype(np.uint8)
        return codes, codes.view(np.int8 if name == "s8" else np.uint8).astype(np.float64)
    table = values_of(name)
    codes = rng.choice(np.flatnonzero(np.isfinite(table)), count)
    return (codes << 2 if name == "e2m1" and mixed else codes), table[codes]


def fragment(matrix: np.ndarray, place: Place, elements: int, bits: int) -> list[np.ndarray]:
    """The registers of a warp's 32 threads for a matrix of codes."""
    per_register = 32 // bits
    registers = np.zeros((elements // per_register, 32), dtype=np.uint32)
    for lane in range(32):
        for i in range(elements):
            row, column = place(lane >> 2, lane % 4, i)
            registers[i // per_register, lane] |= int(matrix[row, column]) << bits * (i % per_register)
    return list(registers)


def accumulators(matrix: np.ndarray, kind: str) -> list[np.ndarray]:
    if kind == "f16":
        return fragment(matrix.astype(np.float16).view(np.uint16), c_place, 4, 16)
    return fragment(matrix.astype({"f32": np.float32, "s32": np.int32}[kind]).view(np.uint32), c_place, 4, 32)


@pytest.mark.parametrize(("shape", "types", "bits"), PLAIN, ids=str)
def test_products(shape: str, types: str, bits: int) -> None:
    rng, depth = np.random.default_rng(0), int(shape[6:])
    *kind, d, a, b, _ = types.split(".")
    a_codes, a_values = codes_and_values(a, 16 * depth, rng, bool(kind))
    b_codes, b_values = codes_and_values(b, depth * 8, rng, bool(kind))
    c = rng.integers(-9, 10, (16, 8))
    key = f"{shape} {bits}"
    registers = multiply(
        product(Opcode(f"mma.sync.aligned.{shape}.row.col.{types}")),
        fragment(a_codes.reshape(16, depth), A_PLACES[key], 16 * depth // 32, bits),
        fragment(b_codes.reshape(depth, 8), B_PLACES[key], 8 * depth // 32, bits),
        accumulators(c, d),
    )
    expected = accumulators(a_values.reshape(16, depth) @ b_values.reshape(depth, 8) + c, d)
    assert all(np.array_equal(x, y) for x, y in zip(registers, expected, strict=True))


@pytest.mark.parametrize(("shape", "kind", "vector", "name", "scale"), SCALED, ids=str)
@pytest.mark.parametrize(("byte", "thread_a", "thread_b"), [(0, 0, 0), (2, 1, 3)])
def test_block_scales(
    shape: str, kind: str, vector: str, name: str, scale: str, byte: int, thread_a: int, thread_b: int
) -> None:
    """9.7.14.3: of the quad of row g, the threads 2 * thread-id-a and the next one have the scales of rows g and
    g + 8, thread-id-b that of column g; bytes from byte-id on, one for each part of K."""
    rng, depth, parts = np.random.default_rng(1), int(shape[6:]), int(vector[0])
    if byte + parts > 4:
        byte = 0
    bits = 4 if kind.startswith("kind::mxf4") else 8
    a_codes, a_values = codes_and_values(name, 16 * depth, rng, bits == 8)
    b_codes, b_values = codes_and_values(name, depth * 8, rng, bits == 8)
    table = values_of(scale)
    sensible = np.flatnonzero(np.isfinite(table) & (table >= 0.25) & (table <= 4))
    a_scales, b_scales = rng.choice(sensible, (16, parts)), rng.choice(sensible, (parts, 8))
    data_a, data_b = (rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    for lane in range(32):
        g, t = lane >> 2, lane % 4
        bytes_a, bytes_b = data_a[lane : lane + 1].view(np.uint8), data_b[lane : lane + 1].view(np.uint8)
        if t // 2 == thread_a:
            bytes_a[byte : byte + parts] = a_scales[g + 8 * (t % 2)]
        if t == thread_b:
            bytes_b[byte : byte + parts] = b_scales[:, g]
    op = f"mma.sync.aligned.{shape}.row.col.{kind}.block_scale.scale_vec::{vector}.f32.{name}.{name}.f32.{scale}"
    form, key = product(Opcode(op)), f"{shape} {bits}"
    c = rng.integers(-9, 10, (16, 8))
    registers = multiply(
        form,
        fragment(a_codes.reshape(16, depth), A_PLACES[key], 16 * depth // 32, bits),
        fragment(b_codes.reshape(depth, 8), B_PLACES[key], 8 * depth // 32, bits),
        accumulators(c, "f32"),
        (scale_factors("a", form, data_a, byte, thread_a), scale_factors("b", form, data_b, byte, thread_b)),
    )
    left = a_values.reshape(16, depth) * np.repeat(table[a_scales], depth // parts, axis=1)
    right = b_values.reshape(depth, 8) * np.repeat(table[b_scales], depth // parts, axis=0)
    expected = accumulators((left @ right + c).astype(np.float32), "f32")
    assert all(np.array_equal(x, y) for x, y in zip(registers, expected, strict=True))


def test_integer_sums_wrap_or_saturate() -> None:
    ones = [np.full(32, 0x01010101, dtype=np.uint32)] * 4
    top = [np.full(32, 0x7FFFFFFF, dtype=np.uint32)] * 4
    for words, expected in (("", 0x80000000 + 31), ("satfinite.", 0x7FFFFFFF)):
        form = product(Opcode(f"mma.sync.aligned.m16n8k32.row.col.{words}s32.s8.s8.s32"))
        assert multiply(form, ones, ones[:2], top)[0][0] == expected


@pytest.mark.parametrize(
    "rest",
    [
        "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3",  # 4X has this type
        "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::2X.f32.e4m3.e4m3.f32.ue8m0",
        "m8n8k4.row.col.f64.f64.f64.f64",
        "m16n8k64.row.col.s32.s4.s4.s32",
    ],
)
def test_forms_that_do_not_exist_are_refused(rest: str) -> None:
    with pytest.raises(Unsupported):
        product(Opcode(f"mma.sync.aligned.{rest}"))
