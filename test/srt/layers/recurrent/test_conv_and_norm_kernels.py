"""Causal convolution, gated norm and output gate against plain torch, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

import interpreter
import pytest
import torch
import torch.nn.functional as F

from sglang.srt.blocks.gqa import reference as gqa_reference
from sglang.srt.blocks.recurrent_state import reference
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm

DEVICE = interpreter.DEVICE
WIDTH = 4
LENS, PREFIXES = (1, 2, 0, 40, 33, 3), (0, 7, 2, 0, 5, 1)
NORMED = (4, 24, 4 * 24 + 3 * 40)
"""Heads with a norm, their dim, all channels."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def ragged(lead: int = 0) -> dict[str, torch.Tensor]:
    """Slot 7 is read by the fourth and fifth, who write to their own."""
    initial = torch.tensor([1, 2, 3, 7, 7, 6])
    slots = torch.tensor([1, 2, 3, 4, 5, 6])
    start = torch.tensor([0, *LENS], dtype=torch.int32).cumsum(0, dtype=torch.int32) + lead
    given = {"initial_slots": initial, "slots": slots, "prefix_lens": torch.tensor(PREFIXES, dtype=torch.int32)}
    return {name: tensor.to(DEVICE) for name, tensor in (given | {"start_loc": start}).items()}


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("norm_heads", "head_dim", "channels"), [(0, 0, 200), NORMED])
def test_convolution_of_prompts(norm_heads: int, head_dim: int, channels: int, bias: bool, dtype: torch.dtype) -> None:
    """Shorter than the window and longer, with and without a state before; other slots and rows stay as they are."""
    wide = randn(3 + sum(LENS), channels + 16, dtype=dtype)
    x, weight = wide[:, 8 : 8 + channels], randn(channels, WIDTH, dtype=dtype)
    own_bias = randn(channels, dtype=dtype) if bias else None
    states = randn(9, WIDTH - 1, channels, dtype=dtype)
    results = []
    for run in (causal_conv.causal_conv_extend, reference.causal_conv_extend):
        out, own = torch.zeros(x.shape, dtype=dtype, device=DEVICE), states.clone()
        run(x, weight, own_bias, own, out=out, norm_heads=norm_heads, head_dim=head_dim, **ragged(lead=3))
        results.append((out, own))
    close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1][[0, 3, 7, 8]], states[[0, 3, 7, 8]]) and not results[0][0][:3].any()


@interpreter.kernel_test
@pytest.mark.parametrize(("norm_heads", "head_dim", "channels"), [(0, 0, 200), NORMED])
def test_convolution_of_one_token(norm_heads: int, head_dim: int, channels: int) -> None:
    """Padding rows touch no state, whatever they compute."""
    x, weight, bias = randn(4, channels), randn(channels, WIDTH), randn(channels)
    states, slots = randn(6, WIDTH - 1, channels), torch.tensor([5, 0, 2, 0], device=DEVICE)
    results = []
    for run in (causal_conv.causal_conv_decode, reference.causal_conv_decode):
        out, own = torch.zeros_like(x), states.clone()
        run(x, weight, bias, own, slots, out, norm_heads, head_dim)
        results.append((out, own))
    close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1][[0, 1, 3, 4]], states[[0, 1, 3, 4]])


@interpreter.kernel_test
def test_a_prompt_in_pieces_is_the_prompt() -> None:
    """Token by token and whole, against torch's own convolution."""
    channels = 200
    x, weight, states = randn(9, channels), randn(channels, WIDTH), randn(3, WIDTH - 1, channels)
    padded = torch.cat((torch.zeros(WIDTH - 1, channels, device=DEVICE), x))
    expected = F.silu(F.conv1d(padded.T[None], weight[:, None], groups=channels)[0].T)
    slot, zero = torch.tensor([2], device=DEVICE), torch.tensor([0], dtype=torch.int32, device=DEVICE)
    whole, pieces, own = torch.empty_like(x), torch.empty_like(x), states.clone()
    loc = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    causal_conv.causal_conv_extend(x, weight, None, own, slot, slot, zero, loc, whole)
    after = own[2].clone()
    own = states.clone()
    loc = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    causal_conv.causal_conv_extend(x[:1], weight, None, own, slot, slot, zero, loc, pieces[:1])
    for t in range(1, 9):
        causal_conv.causal_conv_decode(x[t : t + 1], weight, None, own, slot, pieces[t : t + 1])
    close(whole, expected)
    close(pieces, expected)
    assert torch.equal(own[2], after)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "size"), [(1, 4, 128), (3, 2, 100), (700, 3, 128), (2, 2, 1024)])
def test_gated_norm(tokens: int, groups: int, size: int, shared: bool, gate_first: bool) -> None:
    x, wide = randn(tokens, groups, size, dtype=torch.bfloat16), randn(tokens, groups * size + 32, dtype=torch.bfloat16)
    weight = randn(size if shared else groups * size, dtype=torch.bfloat16)
    arguments = (x, wide[:, 16:-16], weight, 1e-5, gate_first)
    close(gated_norm.gated_rmsnorm(*arguments), reference.gated_rmsnorm(*arguments))


@interpreter.kernel_test
def test_output_gate() -> None:
    x, wide = randn(3, 1100, dtype=torch.bfloat16), randn(3, 1200, dtype=torch.bfloat16)
    expected = gqa_reference.attention_output_gate(x, wide[:, 50:1150])
    close(gated_norm.attention_output_gate(x, wide[:, 50:1150]), expected)


@interpreter.kernel_test
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (6, 24), (12, 128), (5, 256)])
def test_head_gate(heads: int, dim: int) -> None:
    x, gate = randn(3, heads * dim, dtype=torch.bfloat16), randn(3, heads, dtype=torch.bfloat16)
    expected = gqa_reference.attention_head_gate(x, gate)
    close(gated_norm.attention_head_gate(x, gate), expected)
    assert gated_norm.attention_head_gate(x[:0], gate[:0]).shape == (0, heads * dim)


@interpreter.kernel_test
def test_nothing_to_do() -> None:
    x, states = randn(0, 64), randn(2, WIDTH - 1, 64)
    none, loc = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    causal_conv.causal_conv_extend(x, randn(64, WIDTH), None, states, none, none, none, loc, x)
    causal_conv.causal_conv_decode(x, randn(64, WIDTH), None, states, none, x)
    assert gated_norm.gated_rmsnorm(x.view(0, 1, 64), x, randn(64), 1e-5).shape == (0, 64)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
