"""What limits a request's samples by its earlier tokens (penalties, grammars, budgets of thoughts) is exact for every
row of draft tokens: the tokens are those of the plain run, and draft tokens are verified all the same."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.constrained.grammar import Grammar
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from srt.constrained.turned_grammar import compiled
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, accepted, prompts, server_args
from srt.models.harness import VOCAB, save_tiny

NEW_TOKENS = 24
PARAMS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "min_new_tokens": 9, "logit_bias": {"5": 2.0}},
    {"regex": "(three classes of tokens in turn)"},
    {"regex": "(three classes of tokens in turn)", "frequency_penalty": 1.0},
    {},  # thoughts
    {},
]
THOUGHTS = 5
BUDGET = ThinkingBudget(tokens=6, begin=[1], end=[7], inside=True)


def run(scheduler: Scheduler, params: dict[str, Any]) -> dict[int, list[int]]:
    collector = Collector()
    for i, (ids, own) in enumerate(zip(prompts(), PARAMS, strict=True)):
        extra = {name: value for name, value in own.items() if name != "regex"}
        msg = request(f"r{i}", ids, NEW_TOKENS, ignore_eos=True, **params, **extra)
        msg.thinking = BUDGET if i == THOUGHTS else None
        add(scheduler, msg)
        if "regex" in own:
            scheduler.reqs[f"r{i}"].grammar = Grammar(compiled(VOCAB))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return {i: collector.tokens[f"r{i}"] for i in range(len(PARAMS))}


@pytest.mark.parametrize(
    ("params", "spoil_every", "graphs"),
    [
        pytest.param(GREEDY, 0, True, id="greedy, right, graphs"),
        pytest.param(GREEDY, 3, False, id="greedy, half-right, eager"),
        pytest.param(SAMPLED, 1, True, id="sampled, wrong, graphs"),
        pytest.param(SAMPLED, 3, True, id="sampled, half-right, graphs"),
        pytest.param(SAMPLED, 0, False, id="sampled, right, eager"),
    ],
)
def test_limits_are_exact_for_every_row(params: dict[str, Any], spoil_every: int, graphs: bool, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path)
    plain = run(Scheduler(args, create_runner(args), StopChecker(None)), params)
    assert all(token % 3 == n % 3 for i in (3, 4) for n, token in enumerate(plain[i]))
    assert 7 in plain[THOUGHTS][:7]
    scheduler = verifying_scheduler(
        args, KnownTexts(4, spoil_every), {tuple(ids): plain[i] for i, ids in enumerate(prompts())}
    )
    with contextlib.ExitStack() as stack:
        if graphs:
            with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
            stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
        counts = accepted(scheduler)
        assert run(scheduler, params) == plain
    assert {width for width, _ in counts} >= {4}
    if not spoil_every:
        assert all(width == count for width, count in counts)
