"""Grouped expert products against the plain torch loop, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.layers import native_ops
from sglang.srt.layers.moe.fused_moe_triton import align as align_module
from sglang.srt.layers.moe.fused_moe_triton.align import align
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import TILES, MoeTiles, few_pairs, tiles_for

DEVICE = interpreter.DEVICE


def small_tile(block_m: int) -> MoeTiles:
    tile = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2, "num_warps": 4, "num_stages": 2}
    return MoeTiles(float("inf"), tile, tile)


def inputs(num_tokens: int, num_experts: int, top_k: int, hidden: int, inter: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = randn(num_tokens, hidden).to(dtype)
    w13 = (randn(num_experts, 2 * inter, hidden) * hidden**-0.5).to(dtype)
    w2 = (randn(num_experts, hidden, inter) * inter**-0.5).to(dtype)
    weights, ids = native_ops.topk_softmax(randn(num_tokens, num_experts), top_k, True)
    return [t.to(DEVICE) for t in (x, w13, w2, weights, ids)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 6e-3) -> None:
    error, size = (actual.float() - expected.float()).norm(), expected.float().norm()
    assert error <= bound * size, f"error {error:.2e} of {size:.2e}"


def check(num_tokens: int, num_experts: int, tiles: MoeTiles | None, drop: bool = False, **shape: int) -> None:
    dims = {"hidden": 64, "inter": 64, "top_k": 2} | shape
    x, w13, w2, weights, ids = inputs(
        num_tokens, num_experts, dims["top_k"], dims["hidden"], dims["inter"], torch.bfloat16
    )
    if drop:
        ids[0] = -1
        ids[num_tokens // 2, 0] = -1
    expected = native_ops.fused_moe(x, w13, w2, weights, ids)
    actual = fused_moe(x, w13, w2, weights, ids, tiles)
    assert actual.shape == x.shape and actual.dtype == x.dtype
    assert_close(actual, expected)
    if drop:
        assert not actual[0].any()


@interpreter.kernel_test
@pytest.mark.parametrize("drop", [False, True])
def test_pair_by_pair(drop: bool) -> None:
    assert few_pairs(6, 16)
    check(3, 16, None, drop)


@interpreter.kernel_test
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_grouped(num_tokens: int, drop: bool) -> None:
    check(num_tokens, 6, small_tile(16), drop)


@interpreter.kernel_test
@pytest.mark.parametrize(("hidden", "inter"), [(80, 48), (72, 100)])
def test_sizes_that_no_block_divides(hidden: int, inter: int) -> None:
    check(20, 4, small_tile(16), hidden=hidden, inter=inter)
    check(1, 8, None, hidden=hidden, inter=inter)


@interpreter.kernel_test
def test_all_tokens_at_one_expert_and_none() -> None:
    x, w13, w2, weights, ids = inputs(40, 8, 1, 64, 32, torch.bfloat16)
    ids.fill_(3)
    assert_close(fused_moe(x, w13, w2, weights, ids), native_ops.fused_moe(x, w13, w2, weights, ids))
    ids.fill_(-1)
    assert not fused_moe(x, w13, w2, weights, ids).any()
    assert fused_moe(x[:0], w13, w2, weights[:0], ids[:0]).shape == (0, 64)


@interpreter.kernel_test
@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize("block_m", [16, 64])
def test_alignment(one_program: bool, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_program:
        monkeypatch.setattr(align_module, "ONE_PROGRAM_PAIRS", 0)
    generator = torch.Generator().manual_seed(1)
    num_experts, top_k = 12, 3
    ids = torch.randint(-1, num_experts, (500, top_k), generator=generator, dtype=torch.int32)
    blocks = align(ids.to(DEVICE), num_experts, block_m)
    flat = ids.flatten().tolist()
    used = int(blocks.num_blocks)
    places = blocks.sorted_pairs.cpu().view(-1, block_m)
    assert used == sum(-(-flat.count(e) // block_m) for e in range(num_experts))
    assert used <= blocks.max_blocks
    placed = []
    for block, expert in zip(places[:used].tolist(), blocks.block_expert.tolist(), strict=False):
        pairs = [pair for pair in block if pair != len(flat)]
        assert pairs, "a block in use holds at least one pair"
        assert all(flat[pair] == expert for pair in pairs)
        placed += pairs
    assert sorted(placed) == [pair for pair, expert in enumerate(flat) if expert >= 0]
    assert (places[used:] == len(flat)).all()


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 16, 64, 300, 2000])
def test_published_shape(num_tokens: int) -> None:
    """Qwen3-30B-A3B with the tiles that a server uses."""
    check(num_tokens, 128, None, num_tokens > 8, hidden=2048, inter=768, top_k=8)


def test_tiles_share_their_grouping_and_cover_every_batch() -> None:
    for row in TILES:
        assert row.gate_up["BLOCK_M"] == row.down["BLOCK_M"]
    assert tiles_for(1, 128) is TILES[0]
    assert tiles_for(8 * 8192, 128) is TILES[-1]
    assert [row.max_rows_per_expert for row in TILES] == sorted(row.max_rows_per_expert for row in TILES)


def test_in_interpreter() -> None:
    interpreter.run_file(__file__)
