"""Steps of several tokens through DeepSeek-V4, Qwen3.8-Flash-Next and GLM-5.3-Flash: draft tokens that are rejected at
each depth leave pending tokens, entries, states and the tails of n-grams as if they had never come, and the prefix
tree's checkpoints continue them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import in_graphs
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.models.harness import random_tokens, save_tiny
from srt.models.test_stream_drafts import build

LENGTHS = (3, 12, 29)
NEW_TOKENS = 14
"""Runs of 8 tokens end in it, and several of 4."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["deepseek_v4_small", "qwen4_exp_small", "glm5_next_small"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[int]]:
    """To the prompts, without draft tokens."""
    return run(plain(server_args(folder)), prompts())


def server_args(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), skip_tokenizer_init=True,
        **{"device": "cpu", "max_total_tokens": 1024, "max_running_requests": 4, "chunked_prefill_size": 16, **options},
    )  # fmt: skip


def prompts() -> list[list[int]]:
    return [random_tokens(length, seed=length) for length in LENGTHS]


def run(scheduler: Scheduler, texts: list[list[int]], count: int = NEW_TOKENS) -> list[list[int]]:
    collector = Collector()
    for i, ids in enumerate(texts):
        add(scheduler, request(f"r{i}", ids, count, ignore_eos=True, temperature=0.0))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return [collector.tokens[f"r{i}"] for i in range(len(texts))]


def plain(args: ServerArgs) -> Scheduler:
    return Scheduler(args, create_runner(args), StopChecker(None))


@pytest.mark.parametrize(
    ("spoil_every", "graphs"), [(1, False), (2, False), (3, False), (4, False), (3, True), (0, False)]
)
def test_draft_tokens_are_taken_back(spoil_every: int, graphs: bool, folder: Path, answers: list[list[int]]) -> None:
    args, want = server_args(folder), answers
    outputs = {tuple(ids): tokens for ids, tokens in zip(prompts(), want, strict=True)}
    scheduler = verifying_scheduler(args, KnownTexts(4, spoil_every), outputs)
    with contextlib.ExitStack() as stack:
        if graphs:
            stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4), (16,), (0, 4))))
        assert run(scheduler, prompts()) == want
        assert run(scheduler, prompts()) == want, "with prompts and outputs from the cache"


def test_the_next_turn_goes_on_from_a_checkpoint(folder: Path) -> None:
    """Of the cached prefix's tokens none is computed again, and nothing differs."""
    args = server_args(folder)
    scheduler = plain(args)
    first = run(scheduler, prompts()[2:], 20)[0]
    turn = [*prompts()[2], *first, *random_tokens(9, seed=5)]
    again = run(scheduler, [turn])
    assert again == run(plain(args), [turn])


def test_a_layer_over_gated_streams_drafts(tmp_path: Path) -> None:
    """Answers are those of the plain run, also with prompts and outputs from the cache."""
    build(tmp_path)
    want = run(plain(server_args(tmp_path)), prompts())
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}
    scheduler = plain(server_args(tmp_path, speculative_eagle_topk=1, **drafts))
    assert run(scheduler, prompts()) == want
    assert run(scheduler, prompts()) == want
