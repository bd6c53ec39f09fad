"""N-gram drafts in the scheduler: the plain run's tokens, and a history that holds each request's own text, under
chunks, prefix hits, retraction, graphs and every kind of model; its draft tokens are those of a search over that
text."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some_of

from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.drafts.ngram.drafter import NgramDrafter
from sglang.srt.layers.native_ngram import ngram_drafts
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.models.harness import VOCAB, save_tiny

NEW_TOKENS = 33
NUM_REQUESTS = 7
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 8},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 5},
}


def server_args(folder: Path, **options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(folder), skip_tokenizer_init=True, speculative_ngram_external_corpus_max_tokens=100,
        **{"device": "cpu", "max_total_tokens": 4096, "max_running_requests": 8, **options},
    )  # fmt: skip


def prompt(index: int) -> list[int]:
    """Which repeats itself."""
    generator = torch.Generator().manual_seed(index)
    part = torch.randint(1, VOCAB, (4 + 3 * index,), generator=generator).tolist()
    return part + part + part[: index + 1]


def run(scheduler: Scheduler, params: dict[str, Any]) -> list[list[int]]:
    collector = Collector()
    for i in range(NUM_REQUESTS):
        add(scheduler, request(f"r{i}", prompt(i), NEW_TOKENS - i, ignore_eos=True, **params))
    run_to_end(scheduler, collector)
    assert_clean(scheduler)
    return [collector.tokens[f"r{i}"] for i in range(NUM_REQUESTS)]


def plain(args: ServerArgs, params: dict[str, Any]) -> list[list[int]]:
    return run(Scheduler(args, create_runner(args), StopChecker(None)), params)


def drafting(args: ServerArgs, num_tokens: int = 4) -> Scheduler:
    """A scheduler with n-gram drafts and the same flags otherwise."""
    values = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": num_tokens}
    options = {name: value for name, value in vars(args).items() if value != getattr(ServerArgs(model_path="m"), name)}
    drafting_args = ServerArgs.from_kwargs(**{**options, **values})
    return Scheduler(drafting_args, create_runner(drafting_args), StopChecker(None))


def checked(scheduler: Scheduler, texts: list[list[int]]) -> list[int]:
    """Compares the history with `texts` behind every proposal to come, and the draft tokens with those of a history
    that holds the text alone. -> filled with the number of requests of each."""
    drafter = scheduler.runner.drafter
    assert isinstance(drafter, NgramDrafter)
    propose, sizes = drafter.propose, []

    def check(step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        draft_tokens = propose(step, num_speculative_tokens)
        for slot, length, made in zip(step.slots.tolist(), step.lens.tolist(), draft_tokens, strict=True):
            if not slot:
                continue
            known = drafter.history[slot, : length + 1].tolist()
            assert known in [text[: length + 1] for text in texts]
            alone = torch.zeros((2, drafter.history.shape[1]), dtype=torch.int32)
            alone[1, : length + 1] = torch.tensor(known)
            one, last = torch.tensor([1]), torch.tensor(known[-1:])
            expected = ngram_drafts(alone, one, torch.tensor([length]), last, 18, num_speculative_tokens)
            assert torch.equal(made, expected[0])
        sizes.append(len(step.slots))
        return draft_tokens

    drafter.propose = check  # type: ignore[method-assign]
    return sizes


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "pages": {"page_size": 16, "chunked_prefill_size": 16},
    "chunks": {"chunked_prefill_size": 5},
    "no overlap": {"disable_overlap_schedule": True},
}
QUICK = {("default", "penalties"), ("pages", "greedy"), ("chunks", "sampled")}
"""The others run with the thorough tests."""


@pytest.mark.parametrize(("options", "params"), some_of(itertools.product(OPTIONS, PARAMS), QUICK))
def test_the_tokens_of_the_plain_run(options: str, params: str, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path, **OPTIONS[options])
    expected = plain(args, PARAMS[params])
    scheduler = drafting(args)
    sizes = checked(scheduler, [prompt(i) + output for i, output in enumerate(expected)])
    assert run(scheduler, PARAMS[params]) == expected
    assert run(scheduler, PARAMS[params]) == expected, "with prompts and outputs from the cache"
    assert sizes and scheduler.stats.drafts.num_steps


@pytest.mark.parametrize(
    "name",
    [
        "nemotron_h",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("qwen3_moe", "mistral_windows", "qwen3_next")),
        pytest.param("deepseek_v3", marks=pytest.mark.thorough),
    ],
)
def test_kinds_of_models(name: str, tmp_path: Path) -> None:
    """With experts, windows, recurrent states, latents; in graphs, too."""
    save_tiny(name, tmp_path)
    args = server_args(tmp_path, chunked_prefill_size=64)
    expected = plain(args, PARAMS["sampled"])
    for graphs in (False, True):
        scheduler = drafting(args)
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (4,), (16, 64), (0, 4, 8))))
            assert run(scheduler, PARAMS["sampled"]) == expected
            assert run(scheduler, PARAMS["sampled"]) == expected, "with prompts and outputs from the cache"


@pytest.mark.parametrize("num_tokens", [2, 16])
def test_retracted_requests(num_tokens: int, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path, max_total_tokens=330, schedule_conservativeness=0.01)
    expected = plain(args, PARAMS["greedy"])
    scheduler = drafting(args, num_tokens)
    checked(scheduler, [prompt(i) + output for i, output in enumerate(expected)])
    assert run(scheduler, PARAMS["greedy"]) == expected
    assert scheduler.stats.num_retracted > 0


def test_texts_that_repeat_take_fewer_steps(tmp_path: Path) -> None:
    """A tiny model with greedy sampling soon runs in circles."""
    save_tiny("qwen3", tmp_path)
    args = server_args(tmp_path)
    scheduler = drafting(args, 8)
    run(scheduler, PARAMS["greedy"])
    assert scheduler.stats.drafts.since_start.accept_length > 1.3
