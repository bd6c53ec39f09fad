"""The fused sampling kernels against the torch path, interpreted on a CPU and natively on a GPU."""

from __future__ import annotations

from typing import Any

import interpreter
import numpy as np
import pytest
import torch

from sglang.srt.layers import sampler as torch_path
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.triton_ops import sampling as ops
from sglang.srt.sampling.logprobs import LogprobRequest
from sglang.srt.sampling.sampling_params import NO_TOKEN, SamplingParams
from sglang.srt.sampling.sampling_table import SamplingTable

DEVICE = interpreter.DEVICE
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(top_p=0.5, temperature=1.5),
    SamplingParams(min_p=0.1, temperature=2.0),
    SamplingParams(top_k=1),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.4),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={"7": 3.0}),
    SamplingParams(min_new_tokens=2, logit_bias={"0": 1.0}, top_p=0.99),
]


def fill(vocab_size: int, params: list[SamplingParams], device: str = DEVICE) -> SamplingTable:
    table = SamplingTable(len(params) + 1, vocab_size, device)
    for i, p in enumerate(params):
        table.set(i + 1, p, 99 + i, [1, 2, 2], [5, 5, 8], [4])
    return table


def assert_same_choices(vocab_size: int, params: list[SamplingParams], steps: int, masked: bool) -> None:
    """Both paths, token by token (each updates its own penalty counts), with the torch path on the CPU."""
    count = len(params)
    slots = torch.arange(count, 0, -1)
    tables = {True: fill(vocab_size, params), False: fill(vocab_size, params, "cpu")}
    generator = torch.Generator().manual_seed(vocab_size)
    next_token = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
    differing = 0
    for step in range(steps):
        logits = torch.randn(count, vocab_size, generator=generator) * 3
        mask = (
            torch.randint(-(2**31), 2**31, (count, -(-vocab_size // 32)), generator=generator).int() if masked else None
        )
        positions = torch.full((count,), 6 + step, dtype=torch.int32)
        tokens = {}
        for use_triton, table in tables.items():
            device = DEVICE if use_triton else "cpu"
            batch = table.view(slots.numpy(), slots.to(device))
            out = Sampler(use_triton)(
                logits.clone().to(device),
                batch,
                positions.to(device),
                None if mask is None else mask.to(device),
                next_token=next_token if use_triton else None,
            )
            tokens[use_triton] = out.next_token_ids.cpu()
        assert torch.equal(next_token.cpu()[slots], tokens[True])
        differing += int((tokens[True] != tokens[False]).sum())
    # Scores within one rounding of each other may swap; that is once in millions of draws.
    assert differing == 0


@interpreter.kernel_test
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab_size", [301, 9000])
def test_mixed_batch_as_torch(vocab_size: int, masked: bool) -> None:
    assert_same_choices(vocab_size, MIXED, steps=3, masked=masked)


def test_captured_draws_keep_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs hold its address: as many rows as a peak of requests brings later, each with its draft tokens, change
    nothing. More rows than it has are refused."""
    launched: list[list[int]] = []

    class Launch:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **_: launched.append([args[i].data_ptr() for i in (5, 6, 7)])

    monkeypatch.setattr(ops, "draw_tokens_kernel", Launch())
    rows = torch.zeros(1, dtype=torch.int64)
    for count in (1, 257 * 4, 4096 * 16):
        slots = rows.expand(count)
        ops.draw_tokens(torch.zeros(1, 32).expand(count, 32), rows, slots, slots, None, True, None)
    assert len(launched) == 3 and launched[0] == launched[1] == launched[2]
    assert all(part.numel() >= 4096 * 16 for part in ops._draw_scratch(rows.device))
    with pytest.raises(AssertionError, match="rows are drawn at once"):
        slots = rows.expand(ops.DRAW_ROWS + 1)
        ops.draw_tokens(torch.zeros(1, 32).expand(len(slots), 32), rows, slots, slots, None, True, None)


@interpreter.kernel_test
def test_greedy_takes_the_first_of_equals() -> None:
    table = fill(9000, [SamplingParams(temperature=0.0)] * 3)
    slots = torch.tensor([1, 2, 3], device=DEVICE)
    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[1, [8999, 4500, 77]] = 1.0
    logits[2] = -torch.inf
    out = Sampler(True)(
        logits, table.view(slots.cpu().numpy(), slots), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    )
    assert out.next_token_ids.tolist() == [0, 77, NO_TOKEN]


@interpreter.kernel_test
@pytest.mark.parametrize("penalties", [False, True])
def test_tokens_that_a_kernel_writes_into_memory_of_the_host(penalties: bool) -> None:
    """The same ones; penalties count them on the device, where they then stay."""
    params = [p for p in MIXED if penalties or not p.has_penalties]
    count = len(params)
    slots = torch.arange(1, count + 1, device=DEVICE)
    logits = torch.randn(count, 9000, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    positions = torch.full((count,), 6, dtype=torch.int32, device=DEVICE)
    tokens, states = [], []
    for on_host in (False, True):
        table = fill(9000, params)
        next_token = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
        batch = table.view(slots.cpu().numpy(), slots)
        out = Sampler(True)(logits.clone(), batch, positions, next_token=next_token, on_host=on_host)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            assert out.next_token_ids.is_cuda != (on_host and not penalties)
        tokens.append(out.next_token_ids.cpu())
        states.append(next_token.cpu())
    assert torch.equal(*tokens) and torch.equal(*states) and torch.equal(states[0][1:], tokens[0])


@interpreter.kernel_test
@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("use_triton", [True, False])
def test_a_row_that_is_not_numbers_has_no_token(use_triton: bool, params: SamplingParams) -> None:
    """All NaN, one NaN among more tokens than a program reads, and nothing that is allowed; the others as ever."""
    device = DEVICE if use_triton else "cpu"
    vocab_size, count = 9000, 5
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    broken = logits.clone()
    broken[1] = torch.nan
    broken[2, 4999] = torch.nan
    broken[3] = -torch.inf
    slots = torch.arange(1, count + 1, device=device)
    tokens = []
    for x in (logits, broken):
        table = fill(vocab_size, [params] * count, device)
        next_token = torch.full((count + 1,), 7, dtype=torch.int64, device=device)
        batch = table.view(slots.cpu().numpy(), slots)
        positions = torch.full((count,), 6, dtype=torch.int32, device=device)
        request = LogprobRequest([2] * count, [[]] * count)
        out = Sampler(use_triton)(x.clone().to(device), batch, positions, None, request, next_token)
        tokens.append(out.next_token_ids.tolist())
        assert 0 <= next_token.min() and next_token.max() < vocab_size
        assert out.logprobs is not None and out.logprobs.view(torch.float32)[[0, 4], 0].isfinite().all()
    assert tokens[1] == [tokens[0][0], NO_TOKEN, NO_TOKEN, NO_TOKEN, tokens[0][4]]
    assert NO_TOKEN not in tokens[0]


@interpreter.kernel_test
@pytest.mark.parametrize("block", [32, 64, ops.THRESHOLD_BLOCK])
def test_thresholds_keep_the_same_sets(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few lanes, more logits pass than these hold."""
    monkeypatch.setattr(ops, "THRESHOLD_BLOCK", block)
    generator = np.random.default_rng(1)
    vocab_size = 500 if interpreter.ON_CPU else min(151936, 1000 * block)
    params = [
        SamplingParams(
            temperature=float(generator.uniform(0.2, 2)),
            top_k=int(generator.choice([-1, generator.integers(2, 300)])),
            top_p=float(generator.choice([1.0, generator.uniform(0.05, 0.99)])),
            min_p=float(generator.choice([0.0, generator.uniform(0, 0.3)])),
        )
        for _ in range(24)
    ]
    table = fill(vocab_size, params)
    slots = torch.arange(1, 25, device=DEVICE)
    batch = table.view(slots.cpu().numpy(), slots)
    logits = (torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(2)) * 3).to(DEVICE)
    logits[:4] = logits[:4].bfloat16().float()  # ties
    logits[5, 10:] = -torch.inf  # as a grammar leaves it
    logits[6, :] = 2.0
    expected = logits >= torch_path.filter_thresholds(logits, batch, batch.rows())[:, None]
    actual = logits >= ops.filter_thresholds(logits, batch.table, batch.slots)[:, None]
    finite = logits > -torch.inf
    same = ((actual == expected) | ~finite).all(dim=1)
    # A cumulative sum in another precision may move a top_p cut by one token in a vast vocabulary.
    moved = ((actual != expected) & finite).sum(dim=1)
    assert same.float().mean() > 0.9 and moved.max() <= 1 if not interpreter.ON_CPU else same.all()


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch_size", [1, 7, 64, 300])
def test_large_vocabulary_on_a_gpu(batch_size: int) -> None:
    params = (MIXED * (batch_size // len(MIXED) + 1))[:batch_size]
    assert_same_choices(151936, [p for p in params if p.top_p == 1.0], steps=2, masked=batch_size < 64)


@pytest.mark.gpu
@pytest.mark.skipif(interpreter.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_waits_for_the_gpu() -> None:
    table = fill(1000, MIXED)
    slots = torch.arange(1, len(MIXED) + 1, device=DEVICE)
    host_slots, positions = slots.cpu().numpy(), torch.full((len(MIXED),), 6, dtype=torch.int32, device=DEVICE)
    sampler, logits = Sampler(True), torch.randn(len(MIXED), 1000, device=DEVICE)
    sampler(logits, table.view(host_slots, slots), positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i, p in enumerate(MIXED):
            table.set(i + 1, p, i, [1], [2], [3])
        sampler(logits, table.view(host_slots, slots), positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
