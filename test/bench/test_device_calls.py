"""The launches that the kit for owners of a card times."""

from __future__ import annotations

import dataclasses

import interpreter
import pytest
import torch

from sglang.bench import device_calls
from sglang.bench.device_calls import Launch
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.srt.kernels.spec import Need
from sglang.srt.layers.moe.fused_moe_triton import expert_alternatives
from sglang.srt.layers.triton_ops import linear_alternatives
from sglang.tuning.ops import Experts, Linear, Op, parse_shape

CARD = arch_by_name("rtx-pro-6000-server") if interpreter.INTERPRETED else current_arch()


@interpreter.kernel_test
@pytest.mark.parametrize(
    "shape",
    [
        "linear tokens=1 rows=48 cols=512",
        "linear tokens=1 rows=48 cols=256 scheme=nvfp4",
        "linear tokens=3 rows=48 cols=256 scheme=fp8_channel",
        "linear tokens=3 rows=128 cols=256 scheme=fp8_block",
        "fused_moe tokens=2 num_experts=8 top_k=2 hidden=256 intermediate=64",
        "fused_moe tokens=2 num_experts=4 top_k=2 hidden=256 intermediate=64 scheme=int4_g32",
        "fused_moe tokens=3 num_experts=4 top_k=2 hidden=256 intermediate=64 scheme=mxfp4 bias=1",
        "decode_attention batch=2 context=70 heads=4 kv_heads=1 head_dim=64",
        "decode_attention batch=1 context=40 heads=2 kv_heads=1 head_dim=576 v_head_dim=512 latent=1",
        "extend_attention batch=1 new=5 heads=2 kv_heads=1 head_dim=64 prefix=7",
        "latent_absorb tokens=3 heads=2 rows=64 cols=32",
        "gated_delta_rule batch=2 tokens=1 heads=2 key_heads=1 key_dim=16 value_dim=16",
        "gated_delta_rule batch=1 tokens=5 heads=2 key_heads=1 key_dim=16 value_dim=16",
    ],
)
def test_what_is_timed_computes_something(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, types and shapes are those that the kernels take."""
    monkeypatch.setattr(device_calls, "COLD_BYTES", 1 << 10)
    calls = device_calls.calls_of(parse_shape(shape), CARD, interpreter.DEVICE)
    assert calls is not None and len(calls) >= 2
    result = calls[0]()
    if result is not None:
        assert isinstance(result, torch.Tensor) and bool(torch.isfinite(result.float()).all())


@interpreter.kernel_test
@pytest.mark.parametrize(
    "shape",
    [
        "linear tokens=2 rows=48 cols=512",
        "linear tokens=3 rows=48 cols=256 scheme=fp8_channel",
        "linear tokens=1 rows=48 cols=256 scheme=mxfp4",
        "fused_moe tokens=3 num_experts=4 top_k=2 hidden=256 intermediate=64 scheme=fp8_channel",
        "decode_attention batch=2 context=70 heads=4 kv_heads=1 head_dim=64",
        "extend_attention batch=1 new=5 heads=2 kv_heads=1 head_dim=64 prefix=7",
    ],
)
def test_each_result_is_compared_with_the_reference(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_calls, "COLD_BYTES", 1 << 10)
    op = parse_shape(shape)
    launches = device_calls.launches_of(op, CARD, interpreter.DEVICE, launch_of(op))
    assert launches is not None and launches.problem() == ""
    right = launches.calls[0]
    wrong = dataclasses.replace(launches, calls=[lambda: right() * 1.1])  # type: ignore[operator]
    assert "wrong" in wrong.problem()
    not_finite = dataclasses.replace(launches, calls=[lambda: right() * float("nan")])  # type: ignore[operator]
    assert "not finite" in not_finite.problem()


def launch_of(op: Op) -> Launch:
    """The last of the tile configs that are possible: for products of few tokens not the one that the tables choose."""
    if isinstance(op, Linear) and op.scheme is not None:
        need = Need("linear", quant=op.scheme, shapes=((op.rows, op.cols, False),))
        return Launch(linear_alternatives.triton_alternatives(need, CARD, need.shapes[0], op.tokens)[-1])
    if isinstance(op, Experts):
        shapes = ((2 * op.intermediate, op.hidden, False), (op.hidden, op.intermediate, False))
        need = Need("fused_moe", quant=op.scheme, shapes=shapes, experts=(op.num_experts, op.top_k, 1))
        return Launch(expert_alternatives.triton_alternatives(need, CARD, None, op.tokens)[-1])
    return Launch()


def test_what_takes_several_cards_is_not_launched() -> None:
    assert device_calls.calls_of(parse_shape("all_reduce size=4096 ranks=2"), CARD, "cpu") is None


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
