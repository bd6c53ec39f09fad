"""Kernels of adapters of experts against the reference, interpreted on a CPU and natively on a GPU: tokens of several
adapters over routed pairs, every rank, one A or B for all experts, and whole layers of every kind of weights."""

from __future__ import annotations

from dataclasses import replace

import interpreter
import pytest
import torch
from pairs import some

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU
from sglang.srt.layers import native_adapters, native_ops
from sglang.srt.layers.moe.fused_moe_triton import expert_adapters
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import fused_moe
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, tile
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.native_adapters import ExpertAdapterWeights
from srt.layers.moe.moe_harness import assert_close, make_case, tile_configs_of

DEVICE = interpreter.DEVICE
RANKS = (17, 0, 1, 48)


def weights_of(rows: tuple[int, ...], size: int, experts: int, shared: str = "") -> ExpertAdapterWeights:
    """Random A and B, NaN where nothing may be read. rows: of each part; shared: sides that all experts have one of."""
    generator = torch.Generator().manual_seed(size + experts)
    with_a, with_b = (1 if side in shared else experts for side in "ab")
    a = torch.randn(len(RANKS), with_a, len(rows), 48, size, generator=generator) * size**-0.5
    b = torch.randn(len(RANKS), with_b, sum(rows), 48, generator=generator)
    for slot, rank in enumerate(RANKS):
        a[slot, ..., rank:, :], b[slot, ..., rank:] = float("nan"), float("nan")
    parts = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(rows))
    ranks = torch.tensor(RANKS, dtype=torch.int32).to(DEVICE)
    return ExpertAdapterWeights(
        a.to(DEVICE, torch.bfloat16), b.to(DEVICE, torch.bfloat16), ranks, parts.to(DEVICE), experts
    )


def slots_of(tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, len(RANKS) + 1, (tokens,), generator=generator).to(DEVICE, torch.int32)


@interpreter.kernel_test
@pytest.mark.parametrize(("tokens", "of_pairs", "shared"), [(1, False, ""), (20, True, "b"), (300, False, "a")])
def test_pairs_against_the_reference(monkeypatch: pytest.MonkeyPatch, tokens: int, of_pairs: bool, shared: str) -> None:
    monkeypatch.setattr(expert_adapters, "FEW_PAIRS", 100)
    experts, top_k, size = 5, 2, 144
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator).to(DEVICE, torch.int32)
    slots = slots_of(tokens) if tokens > 1 else torch.full((1,), 4, dtype=torch.int32, device=DEVICE)
    x = torch.randn(tokens * top_k if of_pairs else tokens, size, generator=generator).to(DEVICE, torch.bfloat16)
    out = torch.randn(tokens * top_k, 56, generator=generator).to(DEVICE, torch.bfloat16)
    weights, wanted, before = weights_of((28, 28), size, experts, shared), out.clone(), out.clone()
    native_adapters.add_to_pairs(x, wanted, (slots, ids), weights)
    expert_adapters.add_to_pairs(x, out, expert_adapters.order_pairs(slots, ids, len(RANKS), experts), weights)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2**-7, atol=0.06)
    untouched = (ids.flatten() < 0) | (slots.repeat_interleave(top_k) == 0) | (slots.repeat_interleave(top_k) == 2)
    assert torch.equal(out[untouched], before[untouched])
    assert not (out == before)[~untouched].all(-1).any()


@interpreter.kernel_test
@pytest.mark.parametrize("scheme", some([None, "fp8_block", "int4_g64", "mxfp4", "int8_channel"], [None, "fp8_block"]))
def test_layers_against_the_reference(scheme: str | None) -> None:
    """Also with experts that are elsewhere (ids of -1); tokens without adapters have what they have in other steps."""
    bias = scheme == "mxfp4"
    activation = GPT_OSS_SWIGLU if bias else SILU
    case = make_case(scheme, 9, hidden=128, inter=64, bias=bias, device=DEVICE)
    ids = case.ids.masked_fill(torch.arange(18, device=DEVICE).view(9, 2) % 5 == 3, -1)
    case = replace(case, ids=ids)
    slots = slots_of(9)
    up, down = weights_of((64, 64), 128, 4), weights_of((128,), 64, 4)
    one = tile(16, 32, 64, 2, 4, 2)
    configs = tile_configs_of(case.w13, case.w2, ids, tiles=MoeTiles(float("inf"), one, one))
    args = (case.x, case.w13, case.w2, case.weights, ids, activation, configs)
    adapters = PairAdapters(expert_adapters.EXPERT_ADAPTERS, slots, up, down)
    got, without = fused_moe(*args, adapters=adapters), fused_moe(*args)
    reference = replace(adapters, kernels=native_adapters.EXPERT_ADAPTERS)
    wanted = native_ops.fused_moe(*args, adapters=reference)
    assert_close(got, wanted.float(), 4e-2 if scheme else 1e-2)
    plain = (slots == 0) | (slots == 2)
    assert_close(got[plain], without[plain].float(), 6e-3)
    assert (got - without)[~plain].float().norm() > 0.1 * without[~plain].float().norm()


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
