"""The launches that the kit for owners of a card times."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.bench import device_calls
from sglang.srt.hardware.arch import arch_by_name, current_arch
from sglang.tuning.ops import parse_shape

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


def test_what_takes_several_cards_is_not_launched() -> None:
    assert device_calls.calls_of(parse_shape("all_reduce size=4096 ranks=2"), CARD, "cpu") is None


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
