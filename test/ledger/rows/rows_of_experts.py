"""Each row of the grouped products of experts: its tile forced for both products, on sizes that it does not divide.

Only `scripts/execute_kernels.py` runs it, over executed PTX (`@interpreter.kernel_test`).
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from ledger.rows.ledger_rows import parts_of, rows_of
from srt.layers.moe.moe_harness import NATIVE, assert_close, expected, make_case, tile_configs_of

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles

STRIP = 128
"""Columns that tiles of packed weights take at least."""


@interpreter.kernel_test
@pytest.mark.parametrize("row", rows_of("fused_moe/gate_up") + rows_of("fused_moe/down"))
def test_grouped(row: str) -> None:
    words, tile = parts_of(row)
    scheme = None if words[1] == "bf16" else words[1].removesuffix("_a16")
    features = frozenset() if "widened" in words or words[1].endswith("_a16") else NATIVE
    step = max(tile["BLOCK_K"], STRIP)
    hidden = 3 * step if "odd_scales" not in words else 2 * step + 64
    inter = step + (step if "ragged" not in words else max(group_of(scheme), 32))
    if scheme == "fp8_block":
        inter = 2 * step if "ragged" not in words else step // 2 + 64
    with_bias = "bias" in words
    case = make_case(
        scheme, tile["BLOCK_M"] // 2 + 9, 3, 2, hidden, inter, features, with_bias, device=interpreter.DEVICE,
        zero_points="zero_points" in words, static=any(word.startswith("x_factor") for word in words),
    )  # fmt: skip
    case.ids[1] = -1
    case.ids[3, 0] = -1
    activation = GPT_OSS_SWIGLU if with_bias else SILU
    tiles = MoeTiles(float("inf"), tile, tile)
    configs = tile_configs_of(case.w13, case.w2, case.ids, features, tiles)
    actual = fused_moe(case.x, case.w13, case.w2, case.weights, case.ids, activation, configs, features)
    assert_close(actual, expected(case, activation), 1.5e-2 if scheme == "nvfp4" else 1e-2)
    assert not actual[1].any() and actual.dtype == torch.bfloat16


def group_of(scheme: str | None) -> int:
    """Returns the columns that share a scale."""
    rows, cols = SCHEMES[scheme].group if scheme else (0, 0)
    return cols if rows == 1 else 0
