"""Norms, rotations and the store of compressed attention: kernels against plain torch, interpreted here and natively on
a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.compressed import reference as native
from sglang.srt.blocks.compressed.kernels import tail_rotation as kernels

DEVICE = interpreter.DEVICE
CLOSE = {torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def rotary(num_tokens: int, rot: int, num_positions: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(num_positions, rot // 2) * 6.28
    positions = torch.randint(0, num_positions, (num_tokens,)).to(DEVICE)
    return positions, torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "at_once", "dim", "rot"),
    [(1, 16, 1, 512, 64), (3, 5, 4, 512, 64), (9, 3, 1, 32, 8), (9, 5, 4, 64, 64), (3, 9, 8, 128, 64)],
)
def test_queries_and_entries(
    num_tokens: int, heads: int, at_once: int, dim: int, rot: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads left over; kv is a part of wider rows."""
    monkeypatch.setattr(kernels, "HEADS_OF_FEW", at_once)
    positions, cos_sin = rotary(num_tokens, rot)
    q, kv = randn(num_tokens, heads, dim, dtype=dtype), randn(num_tokens, dim + 16, dtype=dtype)[:, 16:]
    weight, loc = randn(dim, dtype=dtype), torch.randperm(num_tokens + 7)[:num_tokens].to(DEVICE)
    results = []
    for op in (kernels.shared_kv_norm_rope_store, native.shared_kv_norm_rope_store):
        own, cache = q.clone(), torch.full((num_tokens + 7, 1, dim), 9.0, dtype=dtype, device=DEVICE)
        assert op(own, kv, positions, cos_sin, weight, 1e-6, cache, loc) is own
        results.append((own, cache))
    (got, got_cache), (want, want_cache) = results
    torch.testing.assert_close(got, want, **CLOSE[dtype])
    torch.testing.assert_close(got_cache, want_cache, **CLOSE[dtype])
    assert (got == want).float().mean() > 0.99 or dtype is torch.float32, "rounded where the reference rounds"


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim", "rot"), [(1, 64, 512, 64), (5, 5, 128, 64), (7, 5, 64, 64), (7, 3, 32, 8)]
)
def test_tails(num_tokens: int, heads: int, dim: int, rot: int, dtype: torch.dtype) -> None:
    """There, and back again."""
    positions, cos_sin = rotary(num_tokens, rot)
    x = randn(num_tokens, heads, dim, dtype=dtype)
    for inverse in (False, True):
        got, want = x.clone(), x.clone()
        assert kernels.tail_rotation(got, positions, cos_sin, inverse) is got
        native.tail_rotation(want, positions, cos_sin, inverse)
        torch.testing.assert_close(got, want, **CLOSE[dtype])
        assert torch.equal(got[..., : dim - rot], x[..., : dim - rot]), "what does not rotate stays"
        assert not torch.equal(got[..., dim - rot :], x[..., dim - rot :])
    if dtype is torch.float32:
        back = kernels.tail_rotation(kernels.tail_rotation(x.clone(), positions, cos_sin), positions, cos_sin, True)
        torch.testing.assert_close(back, x, **CLOSE[dtype])


@interpreter.kernel_test
def test_no_tokens() -> None:
    positions, cos_sin = rotary(0, 8)
    none = randn(0, 4, 32)
    assert kernels.tail_rotation(none, positions, cos_sin) is none
    cache = randn(3, 1, 32)
    kernels.shared_kv_norm_rope_store(none, randn(0, 32), positions, cos_sin, randn(32), 1e-6, cache, positions)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 256, 257, 8192])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_published_shapes(num_tokens: int, heads: int) -> None:
    positions, cos_sin = rotary(num_tokens, 64)
    q, kv = randn(num_tokens, heads, 512, dtype=torch.bfloat16), randn(num_tokens, 512, dtype=torch.bfloat16)
    weight, cache = randn(512, dtype=torch.bfloat16), randn(num_tokens, 1, 512, dtype=torch.bfloat16)
    loc, want, want_cache = torch.arange(num_tokens).to(DEVICE), q.clone(), cache.clone()
    native.shared_kv_norm_rope_store(want, kv, positions, cos_sin, weight, 1e-6, want_cache, loc)
    kernels.shared_kv_norm_rope_store(q, kv, positions, cos_sin, weight, 1e-6, cache, loc)
    torch.testing.assert_close(q, want, rtol=2**-7, atol=2**-5)  # the last digit of a number before its rotation
    assert ((q - want).abs() > 2**-8 + 2**-7 * want.abs()).float().mean() < 1e-6, "and few of them"
    torch.testing.assert_close(cache, want_cache, rtol=2**-7, atol=2**-5)
    want = q.clone()  # of equal inputs: what differs by a digit before a rotation may differ by several behind it
    kernels.tail_rotation(q, positions, cos_sin, inverse=True)
    native.tail_rotation(want, positions, cos_sin, inverse=True)
    torch.testing.assert_close(q, want, **CLOSE[torch.bfloat16])


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
