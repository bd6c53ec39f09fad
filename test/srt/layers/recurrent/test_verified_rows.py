"""Steps that verify draft tokens, and states that go on by those that stand, against tokens that are decoded one by
one: interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

from dataclasses import replace

import interpreter
import pytest
import torch

from sglang.srt.blocks.kimi_delta.kernels import channel_recurrence
from sglang.srt.blocks.recurrent_state import reference
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, recurrence
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels, VerifiedRows
from srt.layers.recurrent.problems import BOUNDED, CHANNELS, DELTA, SSD, Problem, problem, relative

DEVICE = interpreter.DEVICE
WIDTH, TAPS = 3, 4
SLOTS = (4, 0, 2)
"""Of the requests; the second is padding."""
COUNTS = (2, 3, 1)
KERNELS: dict[str, StepKernels] = {
    DELTA: recurrence.RECURRENCE,
    SSD: recurrence.RECURRENCE,
    CHANNELS: channel_recurrence.CHANNEL_RECURRENCE,
    BOUNDED: channel_recurrence.CHANNEL_RECURRENCE,
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rows_of(given: Problem, rows: torch.Tensor) -> Problem:
    parts = {name: getattr(given, name)[rows] for name in ("a", "b", "out") if getattr(given, name) is not None}
    together = torch.cat([getattr(given, name).flatten(1) for name in "qkv"], 1)[rows]
    sizes = [getattr(given, name)[0].numel() for name in "qkv"]
    heads = [getattr(given, name).shape[1:] for name in "qkv"]
    split = zip("qkv", together.split(sizes, 1), heads, strict=True)
    return replace(given, **{name: part.unflatten(1, shape) for name, part, shape in split}, **parts)


def decoded(given: Problem, kernels: StepKernels, slots: torch.Tensor, num_sms: int) -> tuple[torch.Tensor, list]:
    """-> (out [B WIDTH, H, V] of tokens that are decoded one after the other, the states behind each)."""
    out, states = torch.full_like(given.out, 7.0), [given.states]
    for place in range(WIDTH):
        rows = torch.arange(len(slots), device=DEVICE) * WIDTH + place
        out[rows], after = replace(rows_of(given, rows), states=states[-1]).decode(
            kernels.decode, slots, num_sms=num_sms
        )
        states.append(after)
    return out, states


def verified(given: Problem, kernels: StepKernels, slots: torch.Tensor) -> tuple[torch.Tensor, VerifiedRows]:
    out = torch.full_like(given.out, 7.0)
    wide = torch.promote_types(given.v.dtype, torch.float32)
    betas = torch.empty(given.v.shape[:2], dtype=wide, device=DEVICE)
    decays = betas if given.a.ndim == 2 else torch.empty(given.a.shape, dtype=wide, device=DEVICE)
    kept = VerifiedRows(given.states.clone(), torch.empty(0), torch.empty(0), given.k, given.v, decays.clone(), betas)
    parts = (given.q, given.k, given.v, given.a, given.b, given.a_log, given.dt_bias, given.skip)
    kernels.verify(given.rule, *parts, kept.states, slots, out, kept.log_decays, kept.betas)
    assert torch.equal(kept.states, given.states), "they may be taken back"
    return out, kept


def addresses(layers: list[VerifiedRows]) -> torch.Tensor:
    return torch.tensor([layer.addresses() for layer in layers], device=DEVICE)


@interpreter.kernel_test
@pytest.mark.parametrize("kind", [DELTA, SSD, CHANNELS, BOUNDED])
@pytest.mark.parametrize(("num_sms", "state_dtype"), [(1, torch.bfloat16), (10_000, torch.float32)])
def test_rows_are_those_of_decoding(kind: str, num_sms: int, state_dtype: torch.dtype) -> None:
    """In two layers at once, beside both tiles of decoding. Interpreted, every bit is that of decoding; padding gives 0
    and touches no state, and neither does a token that is taken back."""
    kernels, slots = KERNELS[kind], torch.tensor(SLOTS, device=DEVICE)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    heads = (1, 3) if kind in (DELTA, SSD) else (2, 2)  # keys and values of a row differ in size
    layers, expected = [], []
    for _ in range(2):
        lens = (1,) * (len(SLOTS) * WIDTH)
        given = problem(kind, lens, lens, heads, (24, 12), torch.bfloat16, state_dtype, device=DEVICE)
        exact_out, _ = verified(given.exact(), reference.RECURRENCE, slots)
        out, kept = verified(given, kernels, slots)
        of_decoding, states = decoded(given, kernels, slots, num_sms)
        assert relative(out, exact_out) < 1e-2 and not out[WIDTH : 2 * WIDTH].any()
        if interpreter.INTERPRETED:
            assert torch.equal(out, of_decoding)
        assert relative(out, of_decoding.double()) < (1e-3 if state_dtype is torch.float32 else 4e-3)
        after = given.states.clone()
        for slot, count in zip(SLOTS, COUNTS, strict=True):
            after[slot] = states[count][slot] if slot else after[slot]
        layers.append(kept)
        expected.append(after)
    natively = [replace_states(layer, layer.states.clone()) for layer in layers]
    copies = [replace_states(layer.copy(), layer.states.clone()) for layer in layers]
    kernels.commit(given.rule, layers, addresses(layers), slots, counts, WIDTH)
    kernels.commit(given.rule, copies, addresses(copies), slots, counts, WIDTH)
    reference.commit_states(given.rule, natively, addresses(natively), slots, counts, WIDTH)
    for layer, copy, other, after in zip(layers, copies, natively, expected, strict=True):
        assert torch.equal(layer.states, copy.states), "stages of a pipeline commit copies"
        if interpreter.INTERPRETED:
            assert torch.equal(layer.states, after)
        assert relative(layer.states, after.double()) < (1e-5 if state_dtype is torch.float32 else 1e-2)
        assert relative(other.states, after.double()) < (1e-5 if state_dtype is torch.float32 else 1e-2)
        untouched = [slot for slot in range(len(after)) if slot not in (4, 2)]
        assert torch.equal(layer.states[untouched], after[untouched])


def replace_states(layer: VerifiedRows, states: torch.Tensor) -> VerifiedRows:
    return VerifiedRows(states, *layer.tensors()[1:])


@interpreter.kernel_test
@pytest.mark.parametrize(("norm_heads", "head_dim", "channels"), [(0, 0, 200), (2, 24, 2 * 24 + 40)])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)])
def test_convolved_rows_are_those_of_decoding(
    norm_heads: int, head_dim: int, channels: int, dtype: torch.dtype, bias: bool
) -> None:
    slots, counts = torch.tensor(SLOTS, device=DEVICE), torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).to(DEVICE)

    x, weight = randn(len(SLOTS) * WIDTH, channels + 16)[:, 8:-8], randn(channels, TAPS)
    own_bias = randn(channels) if bias else None
    states = randn(6, TAPS - 1, channels)
    kernels, after, of_decoding = causal_conv.CAUSAL_CONV, [states], torch.empty(x.shape, dtype=dtype, device=DEVICE)
    for place in range(WIDTH):
        rows, own = torch.arange(len(SLOTS), device=DEVICE) * WIDTH + place, after[-1].clone()
        part = torch.empty_like(of_decoding[rows])
        kernels.decode(x[rows], weight, own_bias, own, slots, part, norm_heads, head_dim)
        of_decoding[rows] = part
        after.append(own)
    layers = []
    for run in (kernels, reference.CAUSAL_CONV):
        own, (out, kept) = states.clone(), torch.zeros((2, *x.shape), dtype=dtype, device=DEVICE)
        run.verify(x, weight, own_bias, own, slots, out, kept, norm_heads, head_dim)
        assert torch.equal(own, states) and torch.equal(kept, x)
        live = torch.tensor([bool(slot) for slot in SLOTS for _ in range(WIDTH)], device=DEVICE)
        torch.testing.assert_close(out[live], of_decoding[live], rtol=1e-2, atol=1e-2)
        if run is kernels and interpreter.INTERPRETED:
            assert torch.equal(out[live], of_decoding[live])
        layers.append(VerifiedRows(torch.empty(0), own, kept, *(torch.empty(0),) * 4))
        run.commit(layers[-1:], addresses(layers[-1:]), slots, counts, WIDTH)
    twice = [VerifiedRows(torch.empty(0), states.clone(), layers[0].x, *(torch.empty(0),) * 4) for _ in range(2)]
    kernels.commit(twice, addresses(twice), slots, counts, WIDTH)
    expected = states.clone()
    for slot, count in zip(SLOTS, COUNTS, strict=True):
        expected[slot] = after[count][slot] if slot else expected[slot]
    for layer in (*layers, *twice):
        assert torch.equal(layer.conv_states, expected)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
