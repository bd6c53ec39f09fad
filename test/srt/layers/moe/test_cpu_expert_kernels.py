"""What the GPU asks CPUs, and the sum with their results: kernels against the ops in torch."""

from __future__ import annotations

import random

import interpreter
import pytest
import torch

from sglang.srt.layers.moe.cpu_experts import ops
from sglang.srt.layers.moe.cpu_experts.ops import DONE, FETCHED, MAX_PAIRS, MAX_TOKENS, TOKENS, TOP_K, WHOLE, Request
from sglang.srt.layers.triton_ops import cpu_experts as kernels
from sglang.srt.mem_cache.main_memory import device_address, map_memory, register

DEVICE = interpreter.DEVICE
KEPT: list[torch.Tensor] = []
"""Memory stays page-locked until its process ends."""


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)


def request_of(hidden: int, device: str) -> Request:
    sizes = {
        "ids": (MAX_PAIRS, torch.int32),
        "weights": (MAX_PAIRS, torch.float32),
        "x": (MAX_TOKENS * hidden, torch.bfloat16),
        "results": (MAX_TOKENS * hidden, torch.float32),
        "words": (ops.WORDS, torch.int32),
    }
    parts = {name: map_memory(size * dtype.itemsize).view(dtype) for name, (size, dtype) in sizes.items()}
    if device == "cuda":
        assert not any(map(register, parts.values()))
    KEPT.extend(parts.values())
    addresses = torch.tensor([*map(device_address, parts.values())], device=device)
    return Request(**parts, asked=torch.zeros(1, dtype=torch.int32, device=device), addresses=addresses)


@interpreter.kernel_test
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (512, 3)])
def test_division(num_experts: int, top_k: int) -> None:
    """Steps of one token to the most, with padding, with experts of which all, some or none are in slots."""
    choose, hidden = random.Random(num_experts), 1100
    ours, theirs = request_of(hidden, DEVICE), request_of(hidden, "cpu")
    seen = set()
    for step, tokens in enumerate((1, 1, 2, 5, MAX_PAIRS // top_k, 3, 1, 4)):
        tokens = min(tokens, MAX_TOKENS)
        ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).to(torch.int32)
        if tokens > 2:
            ids[-1] = -1
        weights, x = torch.rand(tokens, top_k), torch.randn(tokens, hidden + 20).bfloat16()[:, :hidden]
        share = choose.choice((0, WHOLE // 3, WHOLE // 2, WHOLE))
        slots = choose.choice((0, num_experts // 2, num_experts))
        slot_of = torch.full((num_experts,), -1, dtype=torch.int32)
        slot_of[torch.randperm(num_experts)[:slots]] = torch.arange(slots, dtype=torch.int32)
        clock = torch.tensor([choose.randrange(10**12) + step])
        for request in (ours, theirs):
            request.words.fill_(5)
            request.x.fill_(3.0)
            request.words[FETCHED] = share
        want = ops.divide_misses(ids, weights, x, slot_of, clock, theirs)
        on_device = (tensor.to(DEVICE) for tensor in (ids, weights, x, slot_of, clock))
        got = kernels.divide_misses(*on_device, ours)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(got.cpu(), want)
        pairs = tokens * top_k
        assert torch.equal(ours.ids[:pairs], theirs.ids[:pairs])
        assert torch.equal(ours.weights[:pairs], theirs.weights[:pairs])
        assert ours.words[DONE : DONE + 2].tolist() == [0, 0]
        places = [TOKENS, TOP_K, FETCHED]
        assert ours.words[places].tolist() == theirs.words[places].tolist()
        assert int(ours.asked) == int(theirs.asked)
        asked = (theirs.ids[:pairs].view(tokens, top_k) >= 0).any(1)
        rows = ours.x[: tokens * hidden].view(tokens, hidden)
        assert torch.equal(rows[asked], x[asked]) and bool((rows[~asked] == 3.0).all())
        seen.add((bool(asked.any()), bool((want >= 0).any())))
    assert len(seen) > 1, "the steps are alike"


@interpreter.kernel_test
def test_sum_with_results() -> None:
    hidden = 1100
    request = request_of(hidden, DEVICE)
    out = torch.randn(3, hidden + 4, device=DEVICE).bfloat16()[:, :hidden]
    request.results[: 3 * hidden] = torch.randn(3 * hidden)
    before = out.clone()
    kernels.add_results(out, request)
    assert torch.equal(out, before), "nothing was asked"
    request.asked.fill_(1)
    kernels.add_results(out, request)
    want = before.float().cpu() + request.results[: 3 * hidden].view(3, hidden)
    torch.testing.assert_close(out.cpu(), want.bfloat16(), rtol=0.0, atol=0.0)
