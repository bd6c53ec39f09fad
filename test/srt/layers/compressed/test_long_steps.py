"""Steps of several thousand tokens in the interpreter, with kernels of DeepSeek-V4 that have other forms for them."""

from __future__ import annotations

import interpreter
import pytest

from srt.layers.compressed.test_compressor_kernels import ALONE, OVERLAPPING, PLAIN, texts
from srt.layers.test_hyper_connection import check, problem

interpreted = pytest.mark.skipif(not interpreter.INTERPRETED, reason="interpreted: test_in_interpreter")


@interpreted
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 7168), (64, 320), (65, 320), (600, 96), (4100, 64)])
def test_hyper_connections(num_tokens: int, size: int) -> None:
    check(problem(num_tokens, 4, size))


@interpreted
@pytest.mark.parametrize("form", [OVERLAPPING, ALONE, PLAIN])
def test_compressors(form: tuple[int, int]) -> None:
    given = texts(form, length=4096)
    given.step([(1, 0, 3001), (2, 0, 5)])
    given.step([(2, 5, 2000), (1, 3001, 3002)])
    given.check({1: 3002, 2: 2000})


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
