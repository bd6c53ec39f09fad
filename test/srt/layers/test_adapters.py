"""Kernels of LoRA adapters against fp64, interpreted on a CPU and natively on a GPU: tokens of several adapters mixed,
all ranks, modules of different heights side by side; a token's sum does not depend on the tokens around it."""

from __future__ import annotations

import interpreter
import pytest
import torch

from sglang.srt.layers import native_adapters
from sglang.srt.layers.native_adapters import AdapterWeights
from sglang.srt.layers.triton_ops import adapters

DEVICE = interpreter.DEVICE
RANKS = (17, 0, 1, 48)


def weights_of(rows: tuple[int, ...], size: int, room: int, dtype: torch.dtype = torch.bfloat16) -> AdapterWeights:
    """Random A and B, NaN where nothing may be read. rows: of each module; the first one comes back at the end."""
    generator = torch.Generator().manual_seed(size)
    heights = (*rows, rows[0])
    parts = torch.cat([torch.full((height,), i % len(rows)) for i, height in enumerate(heights)]).to(torch.int32)
    slots = len(RANKS)
    a = torch.randn(slots, len(rows), room, size, generator=generator) * size**-0.5
    b = torch.randn(slots, len(parts), room, generator=generator)
    for slot, rank in enumerate(RANKS):
        a[slot, :, rank:], b[slot, :, rank:] = float("nan"), float("nan")
    ranks = torch.tensor(RANKS, dtype=torch.int32)
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
    ordered = adapters.order_tokens(slots, len(weights.ranks))
    adapters.expand(adapters.shrink(x, ordered, weights), out, ordered, weights)


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
    adapters.expand(adapters.look_up(ids, 30, ordered, weights), out, ordered, weights)
    native_adapters.expand(native_adapters.look_up(ids, 30, slots, weights), reference, slots, weights)
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
