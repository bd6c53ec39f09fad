"""The part of a step's experts that CPUs compute: which of the missing ones, and how their results are added.

The ops in plain torch: the CPU kernels, and the reference for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.kernels.op import Op

MAX_TOKENS, MAX_PAIRS = 16, 128
"""Most tokens, and (token, expert) pairs, of a step in which CPUs take part."""
DONE, TOKENS, TOP_K, FETCHED = 16, 32, 33, 48
"""Places in the words of a request, `struct header` of pool.c."""
WORDS = 64
WHOLE = 4096
"""The share of the missing experts that the GPU copies is so many parts of this."""
TURN = 2531
"""WHOLE times the golden ratio: its multiples fill the numbers below WHOLE evenly."""
STRIDE = 7
"""Experts by which the order of the missing ones turns in each step."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a step asks CPUs, in memory that both sides reach, rows without gaps: `ids` int32 and `weights` fp32 of all
    pairs, an id -1 where CPUs compute nothing; `x` bfloat16, undefined for tokens without a pair; `results` fp32, a row
    of each token; `words` [WORDS] int32: the number of tokens, 0 if there is nothing to compute, k, and the share of
    the missing experts that the GPU copies. `asked` [1] int32 on the device: whether CPUs compute something.
    `addresses` [5] int64 there: of the first five, for kernels."""

    ids: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    results: torch.Tensor
    words: torch.Tensor
    asked: torch.Tensor
    addresses: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuExpertKernels:
    """The two kernels, with the types of those here."""

    divide: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Request], torch.Tensor]
    add: Callable[[torch.Tensor, Request], None]


def divide_misses(
    ids: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
    slot_of_expert: torch.Tensor,
    clock: torch.Tensor,
    request: Request,
) -> torch.Tensor:
    """Divides the experts of ids [T, k] int32 (-1: none) that are in no slot among the GPU, which copies its share of
    them, and CPUs. Returns the GPU's ids [T, k], -1 for pairs of CPUs, and writes the request for these.

    The order of the missing experts turns from one step to the next (`clock` [1] int64), so that each comes to a slot
    at times, and the GPU takes one more or less of them, so that over time they are its share.
    """
    step, num_experts, (tokens, top_k) = int(clock), len(slot_of_expert), ids.shape
    slot_of, share = slot_of_expert.tolist(), int(request.words[FETCHED])
    missing = {expert for expert in ids.flatten().tolist() if expert >= 0 and slot_of[expert] < 0}
    order = sorted(missing, key=lambda expert: (expert + step % num_experts * STRIDE) % num_experts)
    copied = (len(order) * share + step % WHOLE * TURN % WHOLE) // WHOLE
    of_cpus = torch.zeros(num_experts + 1, dtype=torch.bool, device=ids.device)
    of_cpus[order[copied:]] = True
    mine = of_cpus[ids.long()]
    some = bool(mine.any())
    pairs = ids.numel()
    request.ids[:pairs] = torch.where(mine, ids, -1).flatten()
    request.weights[:pairs] = weights.flatten()
    request.x[: x.numel()] = x.flatten()
    request.words[DONE] = 0
    request.words[TOKENS], request.words[TOP_K] = tokens if some else 0, top_k
    request.asked.fill_(int(some))
    return torch.where(mine, -1, ids)


def add_results(out: torch.Tensor, request: Request) -> None:
    """Adds the results of CPUs to out [T, H] if there are any."""
    if int(request.asked):
        out.add_(request.results[: out.numel()].view(out.shape).to(out.device))


CPU_EXPERTS = CpuExpertKernels(divide_misses, add_results)
CPU_EXPERTS_OP = Op("cpu_experts", CPU_EXPERTS)
