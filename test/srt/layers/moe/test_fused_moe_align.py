"""Grouping of pairs by expert, interpreted on a CPU and natively on a GPU; and the tables of tiles."""

from __future__ import annotations

from collections.abc import Collection

import interpreter
import pytest
import torch

from sglang.srt.kernels.scaled_product import PLAIN, ScaledProduct
from sglang.srt.kernels.tile_configs import Tiles, config_for
from sglang.srt.layers.moe.fused_moe_triton import align as align_module
from sglang.srt.layers.moe.fused_moe_triton.align import align
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import ExpertLayer, tile_configs_of
from sglang.srt.layers.moe.fused_moe_triton.tiles import (
    MANY,
    PAIR_TILES,
    TILES,
    WIDE_TILES,
    MoeTiles,
    PairTile,
    few_pairs,
    swaps,
    tile,
    tile_rows,
)


@interpreter.kernel_test
@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize("block_m", [16, 64])
def test_alignment(one_program: bool, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_program:
        monkeypatch.setattr(align_module, "ONE_PROGRAM_PAIRS", 0)
    generator = torch.Generator().manual_seed(1)
    num_experts, top_k = 12, 3
    ids = torch.randint(-1, num_experts - 1, (500, top_k), generator=generator, dtype=torch.int32)
    blocks = align(ids.to(interpreter.DEVICE), num_experts, block_m)
    flat = ids.flatten().tolist()
    used = int(blocks.num_blocks)
    places = blocks.sorted_pairs.cpu().view(-1, block_m)
    assert used == sum(-(-flat.count(e) // block_m) for e in range(num_experts))
    assert used <= blocks.max_blocks
    parts = (blocks.num_blocks, blocks.sorted_pairs, blocks.block_expert)
    assert all(part.data_ptr() % 16 == 0 for part in parts), "or kernels are compiled anew for other batch sizes"
    placed = []
    for block, expert in zip(places[:used].tolist(), blocks.block_expert.tolist(), strict=False):
        pairs = [pair for pair in block if pair != len(flat)]
        assert pairs, "a block in use holds at least one pair"
        assert all(flat[pair] == expert for pair in pairs)
        placed += pairs
    assert sorted(placed) == [pair for pair, expert in enumerate(flat) if expert >= 0]


@interpreter.kernel_test
def test_alignment_of_nothing_but_absent_experts() -> None:
    ids = torch.full((9, 2), -1, dtype=torch.int32, device=interpreter.DEVICE)
    assert int(align(ids, 8, 16).num_blocks) == 0


@pytest.mark.parametrize("table", [TILES, WIDE_TILES])
def test_tiles_share_their_grouping_and_cover_every_batch(table) -> None:
    for kind, rows in table.items():
        for whole in {row.whole for row in rows}:
            limits = [row.max_rows_per_expert for row in rows if row.whole == whole]
            assert limits == sorted(set(limits)), kind
        assert rows[-1].max_rows_per_expert == float("inf") and rows[-1].whole == 1, kind
        assert all(row.gate_up["BLOCK_M"] == row.down["BLOCK_M"] for row in rows), kind


def candidate(tokens: int, layer: ExpertLayer, features: Collection[str] = ()) -> Tiles:
    """The tiles of both products that a step launches."""
    config = config_for(tile_configs_of(layer, features), tokens)
    assert config.variant == MANY
    return config.tiles


def both(tiles: MoeTiles) -> Tiles:
    return tiles.gate_up, tiles.down


def test_tiles_by_batch_and_gpu() -> None:
    assert candidate(52, ExpertLayer(PLAIN, 128, 1, 2048, 768)) == both(TILES["plain"][0])
    wide = {"wgmma"}
    assert candidate(8192, ExpertLayer(ScaledProduct("group128"), 128, 8, 2048, 768), wide) == both(
        WIDE_TILES["group128"][-1]
    )
    layers = [ExpertLayer(ScaledProduct("scaled"), 161, 9, 2048, intermediate) for intermediate in (1536, 192)]
    assert candidate(8192, layers[0], wide) == both(WIDE_TILES["scaled"][-2])
    assert candidate(8192, layers[1], wide) == both(WIDE_TILES["scaled"][-1]), "a quarter would be empty"
    assert [candidate(64, layer, wide)[0]["BLOCK_K"] for layer in layers] == [256, 128]
    assert tile_rows("mx4", wide) is TILES["mx4"], "what large GPUs have no tiles for gets everybody's"
    assert few_pairs(51, 128) and not few_pairs(52, 128)


def test_weights_are_the_tall_operand_only_with_wgmma() -> None:
    few, many = tile(16, 64, 128, 1, 4, 3), tile(64, 64, 128, 8, 4, 3)
    assert swaps(few, "plain", {"wgmma"}) and swaps(many, "planes", {"wgmma"})
    assert not swaps(many, "plain", {"wgmma"}) and not swaps(few, "planes", {"block_scaled_mma"})
    assert not swaps(tile(16, 32, 128, 1, 4, 3), "plain", {"wgmma"}), "a tall operand has at least 64 rows"


@pytest.mark.parametrize("cols", [192, 256, 768, 2048, 2880, 5120, 7168])
def test_streamed_tiles_cover_a_row_with_little_waste(cols: int) -> None:
    for up, down in PAIR_TILES.values():
        for pair_tile in (up, down):
            cut = pair_tile.cut(cols, 128)
            step = cut["COLS"]
            assert step & (step - 1) == 0 and 128 <= step <= pair_tile.max_cols
            assert -(-cols // step) * step < 1.4 * cols
            assert cut["BLOCK_N"] * step == pair_tile.size
    assert PairTile(4096, 1024, 2).cut(2048, 16)["COLS"] == 1024
    assert PairTile(4096, 1024, 2).cut(192, 16)["COLS"] == 256


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
