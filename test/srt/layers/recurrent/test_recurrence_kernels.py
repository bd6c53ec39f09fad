"""Chunked and single-token recurrences against the recurrence in fp64, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import interpreter
import pytest
import torch

from sglang.srt.blocks.recurrent_state import reference
from sglang.srt.blocks.recurrent_state.kernels import recurrence, register_scan
from srt.layers.recurrent.problems import DELTA, SSD, check_extend, problem, relative

DEVICE = interpreter.DEVICE
KINDS = (DELTA, SSD)
# Products of fp32 operands are rounded to tf32 on a GPU: 2.2e-3 was seen of a prompt that decoding continued.
TOLERANCE = {torch.float32: 1e-5 if interpreter.INTERPRETED else 3e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
WIDE = torch.float32 if interpreter.INTERPRETED else torch.bfloat16
"""Of keys of more than 64 numbers: those of fp32 do not fit into the shared memory of SM120."""
SMALL = ((1, 2), (16, 16))
"""(key and value heads), (dims of a key and a value)."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lens", "prefixes"),
    [((1,), (0,)), ((31, 32, 33), (0, 5, 0)), ((63, 64, 65), (0, 5, 0)), ((130,), (7,)), ((3, 0, 200), (1, 9, 0))],
)
def test_lengths(kind: str, lens: tuple[int, ...], prefixes: tuple[int, ...]) -> None:
    """Around the chunk's size, with and without a state before, and with nothing to do."""
    given = problem(kind, lens, prefixes, *SMALL, device=DEVICE)
    check_extend(given, recurrence.recurrence_extend, TOLERANCE[torch.float32])


@interpreter.kernel_test
@pytest.mark.parametrize(
    ("kind", "key_dim", "dtype"),
    [
        *((kind, key_dim, dtype) for kind in KINDS for key_dim, dtype in ((16, torch.float32), (80, WIDE))),
        (SSD, 256, torch.bfloat16),
    ],
)
def test_keys_of_a_state(kind: str, key_dim: int, dtype: torch.dtype) -> None:
    """In registers in one part, in two, and in shared memory, as registers have no room."""
    given = problem(kind, (33, 31), (0, 5), (1, 1), (key_dim, 16), dtype, device=DEVICE)
    check_extend(given, recurrence.recurrence_extend, TOLERANCE[dtype])


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_sms", [1, 2, 4])
def test_columns_of_a_program(kind: str, num_sms: int) -> None:
    """64, 32 and 16 of 64: as few as give every program an SM of its own."""
    given = problem(kind, (70,), (5,), (1, 1), (80, 64), WIDE, device=DEVICE)
    tile = register_scan.scan_tile(1, 64, num_sms)
    assert tile["BLOCK_V"] == 64 // num_sms
    check_extend(given, partial(recurrence.recurrence_extend, num_sms=num_sms), TOLERANCE[WIDE])


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "some", "strong"])
@pytest.mark.parametrize("repeated", [False, True])
def test_decays_and_repeated_keys(kind: str, decay: str, repeated: bool) -> None:
    """Keys that repeat without any decay make the triangular system as ill-conditioned as it gets."""
    given = problem(kind, (150,), (3,), *SMALL, decay=decay, repeated=repeated, device=DEVICE)
    check_extend(given, recurrence.recurrence_extend, TOLERANCE[torch.float32])


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dims"), [((2, 4), (24, 40)), ((2, 2), (128, 64)), ((1, 2), (64, 128))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_and_types(kind: str, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Dims that are no powers of two, heads that share keys; rows before the sequences stay as they are."""
    given = problem(kind, (70, 20), (0, 4), heads, dims, dtype, lead=3, device=DEVICE)
    out, _ = check_extend(given, recurrence.recurrence_extend, TOLERANCE[dtype], lead=3)
    assert not out[:3].any()


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_read_from_one_slot_and_written_to_another(kind: str) -> None:
    """What a prefix tree keeps is not overwritten by those that go on from it."""
    given = problem(kind, (40, 30), (5, 6), *SMALL, device=DEVICE)
    given = replace(given, initial_slots=torch.full_like(given.slots, 3))
    _, states = check_extend(given, recurrence.recurrence_extend, TOLERANCE[torch.float32])
    assert torch.equal(states[3:], given.states[3:]) and torch.equal(states[0], given.states[0])


@interpreter.kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_at_a_chunk_changes_no_bit(kind: str) -> None:
    """A prompt computed in two steps, the first of whole chunks, and in one."""
    given = problem(kind, (150,), (0,), *SMALL, dtype=torch.bfloat16, device=DEVICE)
    whole_out, whole_states = given.extend(recurrence.recurrence_extend)
    middle = 128
    first = replace(given, start_loc=torch.tensor([0, middle], dtype=torch.int32, device=DEVICE))
    first_out, states = first.extend(recurrence.recurrence_extend)
    second = replace(
        given,
        states=states,
        prefix_lens=torch.tensor([middle], dtype=torch.int32, device=DEVICE),
        start_loc=torch.tensor([middle, 150], dtype=torch.int32, device=DEVICE),
    )
    second_out, states = second.extend(recurrence.recurrence_extend)
    assert torch.equal(torch.cat((first_out[:middle], second_out[middle:])), whole_out)
    assert torch.equal(states, whole_states)


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_sms", [1, 10_000])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode(kind: str, num_sms: int, state_dtype: torch.dtype) -> None:
    """Both tiles; padding rows leave every state alone and give 0."""
    given = problem(kind, (1,) * 4, (9,) * 4, (2, 4), (24, 40), torch.bfloat16, state_dtype, device=DEVICE)
    slots = torch.tensor([4, 0, 2, 0], device=DEVICE)
    out, states = given.decode(recurrence.recurrence_decode, slots, num_sms=num_sms)
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
    expected_out, expected_states = given.extend(recurrence.recurrence_extend)
    prompt = replace(given, start_loc=torch.tensor([0, 65], dtype=torch.int32, device=DEVICE))
    _, states = prompt.extend(recurrence.recurrence_extend)
    parts = {name: getattr(given, name)[65:] for name in ("q", "k", "v", "a", "out")}
    last = replace(given, states=states, b=None if given.b is None else given.b[65:], **parts)
    out, states = last.decode(recurrence.recurrence_decode, given.slots)
    assert relative(out, expected_out[65:].double()) < TOLERANCE[torch.float32]
    assert relative(states, expected_states.double()) < TOLERANCE[torch.float32]


@interpreter.kernel_test
def test_nothing_to_do() -> None:
    given = problem(DELTA, (), (), *SMALL, device=DEVICE)
    out, states = given.extend(recurrence.recurrence_extend)
    assert out.shape[0] == 0 and torch.equal(states, given.states)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize(("heads", "dims"), [((16, 32), (128, 128)), ((2, 2), (128, 128)), ((8, 64), (128, 64))])
@pytest.mark.parametrize("decay", ["none", "some", "strong"])
@pytest.mark.parametrize("num_sms", [1, 1 << 20])
def test_published_shapes(
    kind: str, length: int, heads: tuple[int, int], dims: tuple[int, int], decay: str, num_sms: int
) -> None:
    given = problem(kind, (length, 17), (5, 0), heads, dims, torch.bfloat16, decay=decay, device="cuda")
    check_extend(given, partial(recurrence.recurrence_extend, num_sms=num_sms), 2e-2)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
