"""Each instruction that computes registers from registers, against what the text of the ISA says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ledger.ptx_text import bits, computed

from sglang.ledger.ptx.floats import FLOATS
from sglang.ledger.ptx.integers import INTEGERS
from sglang.ledger.ptx.numbers import FORMATS, encode, values_of
from sglang.ledger.ptx.problems import Unsupported

INF, NAN = math.inf, math.nan
HALF = bits(1.0, "f16")
PAIR = bits(1.5, "bf16") | bits(-2.0, "bf16") << 16

CASES: list[tuple[str, tuple[int | float, ...], int | bool]] = [
    # 9.7.1 integer arithmetic
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("add.s64", (-1, 3), 2),
    ("add.s16", (0xFFFF, 2), 1),
    ("add.s16x2", (0x0001FFFF, 0x00020001), 0x00030000),
    ("sub.s32", (3, 5), -2 & 0xFFFFFFFF),
    ("mul.lo.s32", (1 << 20, 1 << 12), 0),
    ("mul.wide.s32", (-2, 3), -6 & (1 << 64) - 1),
    ("mul.wide.u32", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
    ("mul.wide.u16", (0xFFFF, 2), 0x1FFFE),
    ("mul.hi.u32", (0x80000000, 6), 3),
    ("mul.hi.s32", (-1, 1), 0xFFFFFFFF),
    ("mul.hi.u64", (1 << 63, 6), 3),
    ("mad.lo.s32", (3, 4, -5), 7),
    ("mad.lo.s64", (3, -4, 5), -7 & (1 << 64) - 1),
    ("mad.wide.s32", (-2, 4, 100), 92),
    ("mad.wide.u32", (0xFFFFFFFF, 2, 1), 0x1FFFFFFFF),
    ("div.s32", (-7, 2), -3 & 0xFFFFFFFF),
    ("div.u32", (7, 2), 3),
    ("div.s32", (7, 0), 0xFFFFFFFF),
    ("rem.s32", (-7, 2), -1 & 0xFFFFFFFF),
    ("rem.u32", (7, 4), 3),
    ("min.s32", (-1, 1), 0xFFFFFFFF),
    ("min.u32", (0xFFFFFFFF, 1), 1),
    ("max.s64", (-1, 1), 1),
    ("abs.s32", (-5,), 5),
    ("neg.s32", (5,), -5 & 0xFFFFFFFF),
    ("popc.b32", (0xF00F,), 8),
    ("popc.b64", (1 << 63 | 1,), 2),
    ("clz.b32", (1,), 31),
    ("clz.b64", (0,), 64),
    ("brev.b32", (1,), 0x80000000),
    ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.s32", (0xF0, 4, 4), 0xFFFFFFFF),
    ("bfe.s32", (0x70, 4, 4), 7),
    ("bfe.u32", (0xFFFFFFFF, 28, 8), 0xF),
    ("bfe.u32", (5, 0, 0), 0),
    ("dp4a.u32.u32", (0x010203FF, 0x01010101, 0x6400), 0x6400 + 261),
    ("dp4a.s32.u32", (0x010203FF, 0x01010102, 0), 4),
    ("bfi.b32", (0xF, 0, 8, 4), 0xF00),
    # 9.7.8 logic and shifts
    ("and.b32", (12, 10), 8),
    ("or.b64", (12, 10), 14),
    ("xor.b16", (12, 10), 6),
    ("and.pred", (1, 0), False),
    ("or.pred", (1, 0), True),
    ("not.b32", (0,), 0xFFFFFFFF),
    ("not.pred", (1,), False),
    ("lop3.b32", (0b1100, 0b1010, 0b1001, 0xE8), 0b1000),
    ("shl.b32", (1, 31), 0x80000000),
    ("shl.b32", (1, 32), 0),
    ("shl.b16", (0x8001, 1), 2),
    ("shr.u32", (0x80000000, 31), 1),
    ("shr.u32", (0x80000000, 40), 0),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
    ("shf.l.wrap.b32", (0x80000000, 1, 1), 3),
    ("shf.r.clamp.b32", (0, 1, 32), 1),
    # 9.7.6 selection and comparison; 9.7.9.3 mov; 9.7.9.7 prmt
    ("selp.b32", (1, 2, 1), 1),
    ("selp.f32", (1, 2, 0), 2),
    ("setp.lt.s32", (-1, 0), True),
    ("setp.lt.u32", (-1, 0), False),
    ("setp.eq.and.s32", (1, 1, 0), False),
    ("setp.lt.f32", (bits(NAN), bits(0.0)), False),
    ("setp.ne.f32", (bits(NAN), bits(0.0)), False),
    ("setp.neu.f32", (bits(NAN), bits(0.0)), True),
    ("setp.ltu.f32", (bits(1.0), bits(2.0)), True),
    ("setp.nan.f32", (bits(NAN), bits(0.0)), True),
    ("setp.num.f32", (bits(NAN), bits(0.0)), False),
    ("setp.gt.bf16", (bits(2.0, "bf16"), bits(1.0, "bf16")), True),
    ("setp.gt.f16", (bits(-2.0, "f16"), bits(1.0, "f16")), False),
    ("mov.b32", (7,), 7),
    ("mov.pred", (1,), True),
    ("prmt.b32", (0x33221100, 0x77665544, 0x7410), 0x77441100),
    ("prmt.b32", (0x000000F0, 0, 0x0008), 0x000000FF | 0xF0F0F000),
    # 9.7.3 float32
    ("add.f32", (bits(1.5), bits(-2.0)), bits(-0.5)),
    ("add.f32", (bits(1.0), bits(2.0**-25)), bits(1.0)),
    ("add.rn.ftz.f32", (1, 1), 0),
    ("sub.f32", (bits(1.5), bits(-2.0)), bits(3.5)),
    ("mul.f32", (bits(1.5), bits(-2.0)), bits(-3.0)),
    ("mul.ftz.f32", (bits(2.0**-100), bits(-(2.0**-40))), 0x80000000),
    ("fma.rn.f32", (bits(1 + 2.0**-23), bits(1 - 2.0**-23), bits(-1.0)), bits(-(2.0**-46))),
    ("fma.rn.f32", (bits(1.0), bits(1.0), bits(2.0**-24)), bits(1.0)),
    # 1 + 2**-24 is between two numbers; the last bit of the product decides, which float64's sum has not
    ("fma.rn.f32", (bits(1 + 2.0**-12), bits(2.0**-24 - 2.0**-36 + 2.0**-47), bits(1.0)), bits(1 + 2.0**-23)),
    ("min.f32", (bits(NAN), bits(1.0)), bits(1.0)),
    ("min.f32", (bits(0.0), bits(-0.0)), bits(-0.0)),
    ("max.f32", (bits(-0.0), bits(0.0)), bits(0.0)),
    ("max.f32", (bits(-0.0), bits(-0.0)), bits(-0.0)),
    ("max.NaN.f32", (bits(NAN), bits(1.0)), bits(NAN)),
    ("neg.f32", (bits(1.0),), bits(-1.0)),
    ("abs.f32", (bits(-1.0),), bits(1.0)),
    ("copysign.f32", (bits(-0.0), bits(3.0)), bits(-3.0)),
    ("div.rn.f32", (bits(1.0), bits(3.0)), bits(1 / 3)),
    ("div.full.f32", (bits(6.0), bits(2.0**127)), bits(6 * 2.0**-127)),
    ("div.approx.f32", (bits(6.0), bits(2.0**127)), 0),
    ("div.approx.f32", (bits(INF), bits(2.0**127)), bits(NAN)),
    ("ex2.approx.f32", (bits(-3.0),), bits(0.125)),
    ("ex2.approx.ftz.f32", (bits(-130.0),), 0),
    ("ex2.approx.f32", (bits(-130.0),), bits(2.0**-130)),
    ("lg2.approx.f32", (bits(8.0),), bits(3.0)),
    ("sin.approx.f32", (bits(0.0),), bits(0.0)),
    ("cos.approx.f32", (bits(0.0),), bits(1.0)),
    ("tanh.approx.f32", (bits(0.0),), bits(0.0)),
    ("rcp.approx.ftz.f32", (bits(4.0),), bits(0.25)),
    ("rsqrt.approx.ftz.f32", (bits(16.0),), bits(0.25)),
    ("sqrt.approx.f32", (bits(16.0),), bits(4.0)),
    ("sqrt.rn.f32", (bits(2.0),), bits(math.sqrt(2.0))),
    ("add.f32x2", (bits(1.0) << 32 | bits(2.0), bits(3.0) << 32 | bits(4.0)), bits(4.0) << 32 | bits(6.0)),
    ("fma.rm.f32", (bits(1.0), bits(1.0), bits(2.0**-24)), bits(1.0)),
    ("fma.rm.f32", (bits(1.0), bits(1.0), bits(-(2.0**-30))), bits(1 - 2.0**-24)),
    ("fma.rm.f32", (bits(-1.0), bits(1.0), bits(-(2.0**-30))), bits(-1 - 2.0**-23)),
    ("fma.rm.f32", (bits(1 + 2.0**-23), bits(1 + 2.0**-23), bits(0.0)), bits(1 + 2.0**-22)),
    ("fma.rm.f32", (bits(3.0), bits(2.0), bits(1.0)), bits(7.0)),
    ("fma.rn.f32x2", (bits(2.0), bits(3.0), bits(4.0)), bits(10.0)),
    ("add.f64", (bits(1.0, "f64"), bits(2.0, "f64")), bits(3.0, "f64")),
    # 9.7.4 16-bit types, 9.7.5 mixed ones
    ("add.bf16", (bits(1.0, "bf16"), bits(2.0**-9, "bf16")), bits(1.0, "bf16")),
    ("mul.bf16x2", (PAIR, PAIR), bits(2.25, "bf16") | bits(4.0, "bf16") << 16),
    ("fma.rn.bf16x2", (PAIR, PAIR, 0), bits(2.25, "bf16") | bits(4.0, "bf16") << 16),
    ("min.bf16x2", (PAIR, 0), bits(-2.0, "bf16") << 16),
    ("abs.bf16", (bits(-2.0, "bf16"),), bits(2.0, "bf16")),
    ("neg.bf16x2", (PAIR,), PAIR ^ 0x80008000),
    ("add.f16", (HALF, HALF), bits(2.0, "f16")),
    ("fma.rn.f16", (HALF, HALF, HALF), bits(2.0, "f16")),
    ("mul.f16x2", (HALF << 16 | HALF, HALF << 16), HALF << 16),
    ("fma.rn.f32.bf16", (bits(3.0, "bf16"), bits(2.0, "bf16"), bits(0.5)), bits(6.5)),
    ("add.f32.bf16", (bits(3.0, "bf16"), bits(0.5)), bits(3.5)),
    # 9.7.9.21 cvt
    ("cvt.s64.s32", (-1,), (1 << 64) - 1),
    ("cvt.u64.u32", (-1,), 0xFFFFFFFF),
    ("cvt.u32.u64", (1 << 32 | 5,), 5),
    ("cvt.s32.s8", (0x80,), 0xFFFFFF80),
    ("cvt.rn.f32.s32", (-3,), bits(-3.0)),
    ("cvt.rn.f32.u32", (0xFFFFFFFF,), bits(2.0**32)),
    ("cvt.rn.bf16.s32", (257,), bits(256.0, "bf16")),
    ("cvt.rzi.s32.f32", (bits(-1.9),), -1 & 0xFFFFFFFF),
    ("cvt.rni.s32.f32", (bits(2.5),), 2),
    ("cvt.rzi.s32.f32", (bits(1e20),), 0x7FFFFFFF),
    ("cvt.rzi.s64.f32", (bits(1e20),), 0x7FFFFFFFFFFFFFFF),
    ("cvt.rzi.u32.f32", (bits(-5.0),), 0),
    ("cvt.rzi.s32.f32", (bits(NAN),), 0),
    ("cvt.rmi.ftz.f32.f32", (bits(-1.5),), bits(-2.0)),
    ("cvt.rpi.f32.f32", (bits(-1.5),), bits(-1.0)),
    ("cvt.f32.bf16", (bits(1.5, "bf16"),), bits(1.5)),
    ("cvt.f32.f16", (HALF,), bits(1.0)),
    ("cvt.sat.f32.f32", (bits(1.5),), bits(1.0)),
    ("cvt.sat.f32.f32", (bits(0.25),), bits(0.25)),
    ("cvt.sat.f32.f32", (bits(NAN),), 0),
    ("cvt.rn.bf16.f32", (bits(1 + 2.0**-8),), bits(1.0, "bf16")),
    ("cvt.rn.bf16.f32", (bits(1 + 3 * 2.0**-8),), bits(1 + 2.0**-6, "bf16")),
    ("cvt.rn.bf16.f32", (bits(NAN),), 0x7FFF),
    ("cvt.rn.f16.f32", (bits(65520.0),), bits(INF, "f16")),
    ("cvt.rn.bf16x2.f32", (bits(-2.0), bits(1.5)), PAIR),
    ("cvt.rn.f16x2.f32", (bits(-2.0), bits(1.0)), bits(-2.0, "f16") << 16 | HALF),
    ("cvt.rna.tf32.f32", (bits(1 + 2.0**-11),), bits(1 + 2.0**-10)),
    ("cvt.rn.satfinite.e4m3x2.f32", (bits(500.0), bits(-1.0)), 0x7E << 8 | 0xB8),
    ("cvt.rn.satfinite.e4m3x2.f32", (bits(NAN), bits(2.0**-10)), 0x7F00),
    ("cvt.rn.satfinite.e5m2x2.f32", (bits(1e6), bits(1.0)), 0x7B << 8 | 0x3C),
    ("cvt.rn.satfinite.e4m3x2.f16x2", (HALF << 16,), 0x3800),
    ("cvt.rn.satfinite.e2m1x2.f32", (bits(-6.5), bits(0.5)), 0xF1),
    ("cvt.rn.f16x2.e4m3x2", (0x38C0,), HALF << 16 | bits(-2.0, "f16")),
    ("cvt.rn.bf16x2.e4m3x2", (0x38C0,), bits(1.0, "bf16") << 16 | bits(-2.0, "bf16")),
    ("cvt.rn.f16x2.e5m2x2", (0x3CC0,), HALF << 16 | bits(-2.0, "f16")),
    ("cvt.rn.f16x2.e2m1x2", (0x2F,), HALF << 16 | bits(-6.0, "f16")),
    ("cvt.rn.bf16x2.ue8m0x2", (0x807F,), bits(2.0, "bf16") << 16 | bits(1.0, "bf16")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_instruction(case: tuple[str, tuple[int | float, ...], int | bool]) -> None:
    opcode, operands, expected = case
    found = computed(opcode, *operands)
    if isinstance(expected, int) and expected == bits(NAN) and opcode.endswith("f32"):
        assert np.isnan(np.array([found], np.uint32).view(np.float32)[0])
    else:
        assert found == expected, f"{found:#x}"


def test_every_instruction_has_a_case() -> None:
    tested = {opcode.partition(".")[0] for opcode, *_ in CASES}
    assert tested == set(INTEGERS) | set(FLOATS) | {"cvt"}


@pytest.mark.parametrize(
    "opcode",
    ["add.sat.s32", "mul.rz.f32", "cvt.rz.f16.f32", "setp.lt.boolop.s32", "sqrt.approx.f64", "cvt.rn.relu.bf16.f32",
     "fma.rm.ftz.bf16", "cvt.sat.f16.f32",
     "shl.clamp.b32", "frobnicate.b32", "ex2.approx.ftz.bf16x2"],
)  # fmt: skip
def test_what_is_not_known_is_refused(opcode: str) -> None:
    with pytest.raises(Unsupported, match=opcode.replace(".", r"\.")):
        computed(opcode, 0, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_formats(name: str) -> None:
    """Each code's value is encoded as the code, and what lies between two goes to the nearer."""
    values = values_of(name)
    finite = np.flatnonzero(np.isfinite(values))
    assert np.array_equal(encode(name, values[finite]), finite)
    upwards = np.sort(np.unique(values[finite]))
    low, high = upwards[:-1], upwards[1:]
    for share, nearest in ((0.25, low), (0.75, high)):
        between = low + (high - low) * share
        assert np.array_equal(values[encode(name, between)], nearest)


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [("e4m3", 448, 2**-9), ("e5m2", 57344, 2**-16), ("e2m3", 7.5, 0.125), ("e3m2", 28, 2**-4), ("e2m1", 6, 0.5),
     ("ue8m0", 2.0**127, 2.0**-127), ("ue4m3", 448, 2**-9)],
)  # fmt: skip
def test_limits_of_narrow_formats(name: str, largest: float, smallest: float) -> None:
    values = values_of(name)[np.isfinite(values_of(name))]
    assert values.max() == largest
    assert values[values > 0].min() == smallest
