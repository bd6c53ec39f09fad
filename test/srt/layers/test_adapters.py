"""Kernels of LoRA adapters against fp64, interpreted on a CPU and natively on a GPU: tokens of several adapters mixed,
all ranks, modules of different heights side by side; a token's sum does not depend on the tokens around it."""

from __future__ import annotations

import itertools

import interpreter
import pytest
import torch

from sglang.srt.layers import native_adapters
from sglang.srt.layers.native_adapters import AdapterWeights
from sglang.srt.layers.triton_ops import adapters

DEVICE = interpreter.DEVICE
RANKS = (17, 0, 1, 48)


def weights_of(rows: tuple[int, ...], size: int, room: int, adapter_ranks: tuple[int, ...] = RANKS) -> AdapterWeights:
    """Random A and B, NaN where nothing may be read. rows: of each module; the first one comes back at the end."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(size)
    heights = (*rows, rows[0])
    parts = torch.cat([torch.full((height,), i % len(rows)) for i, height in enumerate(heights)]).to(torch.int32)
    slots = len(adapter_ranks)
    a = torch.randn(slots, len(rows), room, size, generator=generator) * size**-0.5
    b = torch.randn(slots, len(parts), room, generator=generator)
    for slot, rank in enumerate(adapter_ranks):
        a[slot, :, rank:], b[slot, :, rank:] = float("nan"), float("nan")
    ranks = torch.tensor(adapter_ranks, dtype=torch.int32)
    made = AdapterWeights(a.to(DEVICE, dtype), b.to(DEVICE, dtype), ranks.to(DEVICE), parts.to(DEVICE))
    return adapters.prepare_adapters(made)


def exact(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, weights: AdapterWeights) -> torch.Tensor:
    result = out.double()
    for token, slot in enumerate(slots.tolist()):
        rank = RANKS[slot - 1] if slot else 0
        for row in range(out.shape[1] if rank else 0):
            a = weights.a[slot - 1, weights.parts[row], :rank].double()
            result[token, row] += weights.b[slot - 1, row, :rank].double() @ (a @ x[token].double())
    return result


def step_of(tokens: int, cols: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, size, generator=generator).to(DEVICE, torch.bfloat16)
    out = torch.randn(tokens, cols, generator=generator).to(DEVICE, torch.bfloat16)
    slots = torch.randint(0, len(RANKS) + 1, (tokens,), generator=generator).to(DEVICE, torch.int32)
    return x, out, slots


def add(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, weights: AdapterWeights) -> None:
    adapters.add(x, out, adapters.order_tokens(slots, len(weights.ranks)), weights)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """A x is rounded once before B, and the sum once more."""
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=0.06)


@interpreter.kernel_test
@pytest.mark.parametrize(("tokens", "size"), [(1, 272), (5, 2100), (40, 64), (130, 200), (600, 64)])
def test_mixed_tokens_against_fp64(tokens: int, size: int) -> None:
    weights = weights_of((40, 8, 24), size, 48)
    x, out, slots = step_of(tokens, 112, size)
    if tokens == 1:
        slots.fill_(4)
    wanted, reference = exact(x, out, slots, weights), out.clone()
    before = out.clone()
    add(x, out, slots, weights)
    native_adapters.add_adapters(x, reference, slots, weights)
    close(out, wanted)
    close(reference, wanted)
    assert torch.equal(out[slots == 0], before[slots == 0])
    changed = (slots > 0) & (slots != 2)
    assert not (out == before)[changed].all(-1).any()


@interpreter.kernel_test
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_columns_of_the_embedding(tokens: int) -> None:
    """Of ids 30 to 129; of others, which other ranks have, nothing is added."""
    weights = weights_of((24,), 100, 48)
    _, out, slots = step_of(tokens, 48, 100)
    ids = torch.randint(0, 160, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    columns = torch.eye(100, dtype=torch.bfloat16, device=DEVICE)
    x = columns[(ids - 30).clamp(0, 99)] * ((ids >= 30) & (ids < 130))[:, None]
    wanted, reference = exact(x, out, slots, weights), out.clone()
    ordered = adapters.order_tokens(slots, len(RANKS))
    adapters.look_up(ids, 30, out, ordered, weights)
    native_adapters.look_up(ids, 30, reference, slots, weights)
    close(out, wanted)
    close(reference, wanted)


@interpreter.kernel_test
def test_logits_in_32_bits() -> None:
    weights = weights_of((300,), 128, 48)
    x, out, slots = step_of(30, 600, 128)
    logits = out.float()
    wanted, reference = exact(x, logits, slots, weights), logits.clone()
    add(x, logits, slots, weights)
    native_adapters.add_adapters(x, reference, slots, weights)
    close(logits, wanted)
    close(reference, wanted)


@interpreter.kernel_test
def test_a_token_alone_has_the_same_sum() -> None:
    weights = weights_of((64, 32), 512, 48)
    x, out, slots = step_of(20, 160, 512)
    mixed = out.clone()
    add(x, mixed, slots, weights)
    for token in (0, 7, 19):
        alone = out[token : token + 1].clone()
        add(x[token : token + 1], alone, slots[token : token + 1], weights)
        assert torch.equal(alone[0], mixed[token])


@interpreter.kernel_test
def test_rows_of_a_wider_tensor() -> None:
    weights = weights_of((40, 8, 24), 128, 48)
    x, out, slots = step_of(9, 112, 128)
    wide = torch.cat((out, out), dim=1)
    wanted = exact(x, out, slots, weights)
    add(x, wide[:, :112], slots, weights)
    close(wide[:, :112], wanted)
    assert torch.equal(wide[:, 112:], out)


@interpreter.kernel_test
@pytest.mark.parametrize(("tokens", "size", "room"), [(1, 2100, 32), (1, 12, 16), (7, 1300, 32), (16, 200, 16)])
def test_one_launch_adds_what_two_do(tokens: int, size: int, room: int) -> None:
    """Bit for bit on a GPU, with a module that is wider than a tile; and both add what the reference does."""
    weights = weights_of((300, 40), size, room, (room, 0, 1, room - 3))
    x, out, slots = step_of(tokens, 640, size)
    if tokens == 1:
        slots.fill_(1)
    ordered, one, two, reference = adapters.order_tokens(slots, len(RANKS)), out.clone(), out.clone(), out.clone()
    adapters.add_at_once(x, one, ordered, weights)
    adapters.expand(adapters.shrink(x, ordered, weights), two, ordered, weights)
    native_adapters.add_adapters(x, reference, slots, weights)
    torch.testing.assert_close(one, two, **interpreter.SAME_BITS)
    assert not torch.equal(one, out)
    close(one, reference.double())
    assert torch.equal(one[(slots == 0) | (slots == 2)], out[(slots == 0) | (slots == 2)])


def test_when_one_launch_is_enough() -> None:
    """Sizes of Qwen3-8B: few tokens, ranks of which a program reads all of A in short time."""
    taken = {}
    for (rows, size), rank in itertools.product(((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)), (16, 64)):
        a, b = torch.empty(8, 1, rank, size, dtype=torch.bfloat16), torch.empty(8, rows, rank, dtype=torch.bfloat16)
        parts, ranks = torch.zeros(rows, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        weights = adapters.prepare_adapters(AdapterWeights(a, b, ranks, parts))
        steps = (torch.empty(tokens, dtype=torch.int32) for tokens in (1, 2, 4, 5, 8, 64))
        chunks = [adapters.Chunks(slots, torch.empty(min(len(slots), 8), 3), 16) for slots in steps]
        taken[rows, size, rank] = [adapters.takes_one_launch(each, weights) for each in chunks].count(True)
    of_16 = {(6144, 4096, 16): 3, (4096, 4096, 16): 4, (24576, 4096, 16): 1, (4096, 12288, 16): 2}
    assert taken == {key: of_16.get(key, 0) for key in taken}


@interpreter.kernel_test
@pytest.mark.parametrize("tokens", [1, 17, 300, 700, 1500])
def test_chunks_have_each_token_of_an_adapter_once(tokens: int) -> None:
    """1,500 tokens are not ordered by the kernel."""
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randint(-2, 4, (tokens,), generator=generator).clamp_min(0).to(DEVICE, torch.int32)
    chunks = adapters.order_tokens(slots, 5)
    order, found = chunks.order.tolist(), []
    for slot, begin, count in chunks.table.tolist():
        assert count <= chunks.rows and (slot > 0) == (count > 0)
        found += [(slot, token) for token in order[begin : begin + count]]
    assert found == sorted((slot, token) for token, slot in enumerate(slots.tolist()) if slot)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
