"""Kimi delta attention, chunked and of single tokens, against the recurrence in fp64: interpreted on a CPU and natively
on a GPU."""

from __future__ import annotations

from dataclasses import replace

import interpreter
import pytest
import torch

from sglang.srt.blocks.kimi_delta.kernels.channel_recurrence import CHANNEL_RECURRENCE
from sglang.srt.blocks.recurrent_state import reference
from srt.layers.recurrent.problems import BOUNDED, CHANNELS, check_extend, problem, relative

DEVICE = interpreter.DEVICE
KINDS = (CHANNELS, BOUNDED)
# Products of fp32 operands are rounded to tf32 on a GPU.
TOLERANCE = {torch.float32: 1e-5 if interpreter.INTERPRETED else 3e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMALL = ((1, 1), (16, 16))
"""(key and value heads), (dims of a key and a value)."""
extend, decode = CHANNEL_RECURRENCE.extend, CHANNEL_RECURRENCE.decode


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("kind", "lens", "prefixes"),
    [
        (CHANNELS, (1,), (0,)),
        (BOUNDED, (63, 16, 65), (0, 5, 0)),
        (CHANNELS, (130,), (7,)),
        (BOUNDED, (3, 0, 17), (1, 9, 0)),
    ],
)
def test_lengths(kind: str, lens: tuple[int, ...], prefixes: tuple[int, ...]) -> None:
    """Around the sizes of a chunk and of its parts, with and without a state before, and with nothing to do."""
    given = problem(kind, lens, prefixes, *SMALL, device=DEVICE)
    check_extend(given, extend, TOLERANCE[torch.float32])


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "some", "strong"])
@pytest.mark.parametrize("repeated", [False, True])
def test_decays_and_repeated_keys(kind: str, decay: str, repeated: bool) -> None:
    """Strong decays sum up to logs of which exp overflows with the other sign."""
    given = problem(kind, (70,), (3,), *SMALL, decay=decay, repeated=repeated, device=DEVICE)
    check_extend(given, extend, TOLERANCE[torch.float32])


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_channels_that_forget_beside_channels_that_do_not(kind: str) -> None:
    """The two ends of decays in one head."""
    given = problem(kind, (40,), (3,), *SMALL, device=DEVICE)
    given.dt_bias[:, ::2] = -60.0
    given.dt_bias[:, 1::2] = 60.0
    check_extend(given, extend, TOLERANCE[torch.float32])


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("kind", "heads", "dims", "dtype"),
    [
        (CHANNELS, (3, 3), (24, 40), torch.float16),
        (BOUNDED, (1, 1), (128, 128), torch.bfloat16),
        pytest.param(CHANNELS, (1, 1), (128, 128), torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_shapes_and_types(kind: str, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Dims that are no powers of two; rows before the sequences stay as they are."""
    given = problem(kind, (35, 20), (0, 4), heads, dims, dtype, lead=3, device=DEVICE)
    out, _ = check_extend(given, extend, TOLERANCE[dtype], lead=3)
    assert not out[:3].any()


@interpreter.kernel_test
def test_a_state_is_read_from_one_slot_and_written_to_another() -> None:
    """What a prefix tree keeps is not overwritten by those that go on from it."""
    given = problem(BOUNDED, (40, 30), (5, 6), *SMALL, device=DEVICE)
    given = replace(given, initial_slots=torch.full_like(given.slots, 3))
    _, states = check_extend(given, extend, TOLERANCE[torch.float32])
    assert torch.equal(states[3:], given.states[3:]) and torch.equal(states[0], given.states[0])


@interpreter.kernel_test
def test_a_cut_at_a_chunk_changes_no_bit() -> None:
    """A prompt computed in two steps, the first of whole chunks, and in one."""
    given = problem(CHANNELS, (150,), (0,), *SMALL, dtype=torch.bfloat16, device=DEVICE)
    whole_out, whole_states = given.extend(extend)
    middle = 128
    first = replace(given, start_loc=torch.tensor([0, middle], dtype=torch.int32, device=DEVICE))
    first_out, states = first.extend(extend)
    second = replace(
        given,
        states=states,
        prefix_lens=torch.tensor([middle], dtype=torch.int32, device=DEVICE),
        start_loc=torch.tensor([middle, 150], dtype=torch.int32, device=DEVICE),
    )
    second_out, states = second.extend(extend)
    assert torch.equal(torch.cat((first_out[:middle], second_out[middle:])), whole_out)
    assert torch.equal(states, whole_states)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_sms", [1, 10_000])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode(kind: str, num_sms: int, state_dtype: torch.dtype) -> None:
    """Both tiles; padding rows leave every state alone and give 0."""
    given = problem(kind, (1,) * 4, (9,) * 4, (3, 3), (24, 40), torch.bfloat16, state_dtype, device=DEVICE)
    slots = torch.tensor([4, 0, 2, 0], device=DEVICE)
    out, states = given.decode(decode, slots, num_sms=num_sms)
    expected_out, expected_states = given.exact().decode(reference.recurrence_decode, slots)
    assert relative(out, expected_out) < TOLERANCE[torch.bfloat16]
    assert relative(states, expected_states) < (1e-6 if state_dtype is torch.float32 else 1e-2)
    untouched = [0, 1, 3, 5, 6]
    assert torch.equal(states[untouched], given.states[untouched])
    assert not out[[1, 3]].any()


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_decode_continues_a_prompt(kind: str) -> None:
    given = problem(kind, (66,), (0,), *SMALL, device=DEVICE)
    expected_out, expected_states = given.extend(extend)
    prompt = replace(given, start_loc=torch.tensor([0, 65], dtype=torch.int32, device=DEVICE))
    _, states = prompt.extend(extend)
    parts = {name: getattr(given, name)[65:] for name in ("q", "k", "v", "a", "b", "out")}
    out, states = replace(given, states=states, **parts).decode(decode, given.slots)
    assert relative(out, expected_out[65:].double()) < TOLERANCE[torch.float32]
    assert relative(states, expected_states.double()) < TOLERANCE[torch.float32]


@interpreter.kernel_test
def test_nothing_to_do() -> None:
    given = problem(CHANNELS, (), (), *SMALL, device=DEVICE)
    out, states = given.extend(extend)
    assert out.shape[0] == 0 and torch.equal(states, given.states)


def test_equal_decays_of_all_channels_are_the_gated_delta_rule() -> None:
    """The two rules in plain torch, where channels forget alike."""
    given = problem(CHANNELS, (20,), (3,), *SMALL)
    given.a.copy_(given.a[..., :1].expand_as(given.a))
    given.dt_bias.copy_(given.dt_bias[:, :1].expand_as(given.dt_bias))
    out, states = given.extend(reference.recurrence_extend)
    alike = replace(given, rule=replace(given.rule, by_channel=False), a=given.a[..., 0], dt_bias=given.dt_bias[:, 0])
    expected_out, expected_states = alike.extend(reference.recurrence_extend)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(states, expected_states)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("heads", [4, 32, 64])
@pytest.mark.parametrize("decay", ["none", "some", "strong"])
def test_published_shapes(kind: str, length: int, heads: int, decay: str) -> None:
    given = problem(kind, (length, 17), (5, 0), (heads, heads), (128, 128), torch.bfloat16, decay=decay, device="cuda")
    check_extend(given, extend, 2e-2)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
