"""What an indexer does to keys and queries, and how latents are packed: kernels against plain torch, interpreted here
and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.blocks.mla import reference
from sglang.srt.blocks.mla.kernels import latent_pack
from sglang.srt.layers import native_sparse_ops
from sglang.srt.layers.triton_ops import index_rope

DEVICE = interpreter.DEVICE
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "first", "count", "heads", "dims"),
    [
        (1, 0, 1, 32, (128, 64, 0)),
        (5, 2, 3, 64, (128, 64, 0)),
        (40, 0, 0, 32, (128, 64, 0)),
        (40, 40, 0, 5, (24, 16, 0)),
        (9, 0, 9, 4, (256, 32, 0)),
        (5, 2, 3, 32, (128, 64, 64)),
        (9, 0, 9, 4, (24, 8, 10)),
    ],
)
def test_keys_and_queries(
    num_tokens: int,
    first: int,
    count: int,
    heads: int,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    is_neox_style: bool,
) -> None:
    dim, rot, begin = dims
    # A slice of a wider product, whose mean is far from 0.
    keys = (randn(num_tokens, dim + 32, scale=3.0, dtype=torch.float32) + 5.0).to(dtype)[:, 32:]
    queries = randn(count, heads, dim, dtype=dtype) if count else None
    weight, bias = randn(dim, dtype=torch.float32), randn(dim, dtype=torch.float32)
    positions = torch.randint(0, 50, (num_tokens,)).to(DEVICE)
    angles = torch.rand(50, rot // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    results = []
    for op in (index_rope.index_norm_rope, native_sparse_ops.index_norm_rope):
        own = None if queries is None else queries.clone()
        results.append((op(keys, own, first, positions, cos_sin, weight, bias, 1e-6, is_neox_style, begin), own))
    (got, got_queries), (want, want_queries) = results
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=bound, atol=bound)
    if queries is not None:
        torch.testing.assert_close(got_queries.float(), want_queries.float(), rtol=bound, atol=bound)
        for stays in (slice(0, begin), slice(begin + rot, dim)):
            assert torch.equal(got_queries[..., stays], queries[..., stays])


@interpreter.kernel_test
def test_no_tokens() -> None:
    none, row = torch.zeros(0, dtype=torch.int64, device=DEVICE), randn(128, dtype=torch.float32)
    cos_sin = randn(9, 64, dtype=torch.float32)
    assert index_rope.index_norm_rope(randn(0, 128), None, 0, none, cos_sin, row, row, 1e-6).shape == (0, 128)
    latent_pack.latent_pack_store(randn(0, 576), torch.zeros(3, 1, 656, dtype=torch.uint8, device=DEVICE), none)


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_latents(dtype: torch.dtype) -> None:
    entries = randn(7, 600, scale=9.0, dtype=dtype)[:, 24:]
    entries[3, 128:256] = 0.0
    loc = torch.randperm(20)[:7].to(DEVICE)
    got, want = (torch.full((20, 1, 656), 9, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    latent_pack.latent_pack_store(entries, got, loc)
    reference.latent_pack_store(entries, want, loc)
    others = torch.ones(20, dtype=torch.bool, device=DEVICE)
    others[loc] = False
    assert (got[others] == 9).all(), "of other entries nothing is written"
    assert (got == want).float().mean() > 0.99, "an even quotient may be rounded to either neighbour"
    unpacked = native_sparse_ops.unpack_latents(got[loc, 0])
    bound = entries.float().unflatten(-1, (-1, 64)).abs().amax() / 16  # of e4m3: three bits behind the first
    assert (unpacked - entries.float()).abs().max() < bound
    torch.testing.assert_close(unpacked[:, 512:], entries[:, 512:].bfloat16().float(), rtol=0.0, atol=0.0)


@interpreter.kernel_test
def test_packed_latents_lie_together() -> None:
    with pytest.raises(ValueError, match="656 bytes apart"):
        latent_pack.latent_pack_store(randn(1, 576), torch.zeros(3, 1, 1312, dtype=torch.uint8)[..., :656], randn(1))


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
