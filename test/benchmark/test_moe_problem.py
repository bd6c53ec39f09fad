"""The launches that the tuner times are those of `fused_moe`: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch
from moe_problem import Problem

from sglang.srt.configs.activation import SILU
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as module
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import forced
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, tile
from sglang.tuning.search_space import MoeShape

SCHEMES = (None, "fp8_tensor", "fp8_channel", "fp8_block", "int4_g32", "nvfp4")


def test_the_order_of_programs_is_tuned_on_the_fastest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up GPU on which groups of 32 blocks are best for one product and none for the other."""
    timed: list[tuple[str, int, int]] = []

    def seconds(kind: str, choice: dict[str, int], num_tokens: int, best: float = 0.0) -> float:
        timed.append((kind, choice["BLOCK_N"], choice["GROUP_M"]))
        order = abs(choice["GROUP_M"] - 32) if kind == "down" else choice["GROUP_M"]
        return 1000.0 * choice["BLOCK_N"] + order

    problem = Problem.__new__(Problem)
    monkeypatch.setattr(problem, "prepare", lambda num_tokens: None)
    monkeypatch.setattr(problem, "time", seconds)
    kept = {kind: [(tile(64, n, 128, 8, 4, 2), None) for n in (64, 32, 128)] for kind in ("gate_up", "down")}
    _, pair, _ = problem.fastest(kept, 4096)
    assert (pair.gate_up["BLOCK_N"], pair.gate_up["GROUP_M"]) == (32, 1)
    assert (pair.down["BLOCK_N"], pair.down["GROUP_M"]) == (32, 32)
    assert {n for _, n, group in timed if group != 8} == {32}, "orders were tried on tiles that are not the fastest"


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_products_give_what_the_layer_gives(scheme: str | None) -> None:
    """Each product of the problem, one after the other, and the weighted sum, against the layer with the same tiles."""
    shape = MoeShape(6, 128, 128, 2, scheme)
    problem = Problem(shape)
    problem.prepare(5)
    up, down = tile(16, 32, 128, 1, 4, 2), tile(16, 64, 128, 1, 4, 2)
    problem.calls("gate_up", up)[0]()
    problem.inputs.b = module._operand(problem.inputs.inter, problem.w2)
    problem.calls("down", down)[0]()
    weighted = problem.inputs.topk_weights[..., None] * problem.inputs.out.view(5, 2, 128).float()
    layer = module.fused_moe(
        problem.inputs.x,
        problem.w13,
        problem.w2,
        problem.inputs.topk_weights,
        problem.inputs.topk_ids[0],
        SILU,
        forced(MoeTiles(float("inf"), up, down), module.product_for(problem.w13)),
        features=problem.features,
    )
    assert layer.float().abs().max() > 0
    torch.testing.assert_close(weighted.sum(1), layer.float(), rtol=2e-2, atol=1e-2 * float(layer.float().abs().max()))


@interpreter.kernel_test
def test_routings_choose_distinct_experts_and_differ() -> None:
    problem = Problem(MoeShape(16, 64, 64, 4, None))
    problem.prepare(8)
    first, second = problem.inputs.topk_ids[:2]
    assert all(len(set(row)) == 4 for row in first.tolist())
    assert first.dtype == torch.int32 and not torch.equal(first, second)
    assert len(problem.calls("down", tile(16, 64, 64, 1, 4, 2))) == len(problem.inputs.topk_ids)


@pytest.mark.thorough
def test_in_interpreter() -> None:
    interpreter.run_file(__file__, interpreter.EVERY_CASE)
