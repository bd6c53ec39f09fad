"""The emulated matrix instruction and load against numpy, by the fragment layouts of the PTX ISA, written out here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent > 0, (8.0 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes & 0x80, -value, value)


def e2m1(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])


def words(bytes_of_lane: np.ndarray) -> np.ndarray:
    """[32, n, 4] bytes, the first lowest -> [32, n] uint32."""
    return np.ascontiguousarray(bytes_of_lane.astype(np.uint8)).view("<u4")[..., 0]


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("byte", [0, 3])
def test_multiply_add(cpu_library: Path, byte: int) -> None:
    rng = np.random.default_rng(byte)
    a = rng.integers(0, 256, (16, 32))
    a[a & 0x7F == 0x7F] = 0  # not a number
    b = rng.integers(0, 16, (8, 32))  # column by column
    a_scale, b_scale = rng.integers(120, 134, 16), rng.integers(120, 134, 8)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    fours = 4 * T[:, None] + np.arange(4)
    a_words = np.stack([words(a[(G + 8 * (i % 2))[:, None], 16 * (i // 2) + fours]) for i in range(4)], 1)
    b_words = np.stack([words(b[G[:, None], 16 * i + fours] << 2) for i in range(2)], 1)
    at = [(G + 8 * (i // 2), 2 * T + i % 2) for i in range(4)]
    # What no layout reads is garbage: the other bytes of the scales, and the scales of lanes that are not asked.
    scales = rng.integers(0, 2**32, (2, 32), dtype=np.uint32)
    mask = np.uint32(~(255 << 8 * byte) & 0xFFFFFFFF)
    for t, rows in ((0, slice(0, 8)), (1, slice(8, 16))):
        mine = T == t
        scales[0, mine] = (scales[0, mine] & mask) | (a_scale[rows].astype(np.uint32) << 8 * byte)
    scales[1, T == 0] = (scales[1, T == 0] & mask) | (b_scale.astype(np.uint32) << 8 * byte)
    d = np.stack([c[rows, cols] for rows, cols in at], 1).astype(np.float32)
    operands = (address(array) for array in (a_words, b_words, scales[0], scales[1], d))
    ctypes.CDLL(str(cpu_library)).one_multiply_add(*operands, byte)
    wanted = c + (e4m3(a) * 2.0 ** (a_scale - 127.0)[:, None]) @ (e2m1(b) * 2.0 ** (b_scale - 127.0)[:, None]).T
    actual = np.zeros((16, 8))
    for i, (rows, cols) in enumerate(at):
        actual[rows, cols] = d[:, i]
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("nibbles", [False, True])
def test_loads(cpu_library: Path, nibbles: bool) -> None:
    """Matrix i has rows 8 i to 8 i + 7; of nibbles the second half of each row of 16 bytes is padding."""
    rows = np.random.default_rng(5).integers(0, 256, (32, 16), dtype=np.uint8)
    columns = np.stack([rows & 15, rows >> 4], -1).reshape(32, 32)[:, :16] if nibbles else rows
    found = np.zeros((32, 4), np.uint32)
    ctypes.CDLL(str(cpu_library)).one_load(address(rows), address(found), int(nibbles))
    for i in range(4):
        np.testing.assert_array_equal(found[:, i], words(columns[(8 * i + G)[:, None], 4 * T[:, None] + np.arange(4)]))
