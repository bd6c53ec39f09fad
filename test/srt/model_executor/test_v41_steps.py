"""DeepSeek-V4.1 in a scheduler: draft tokens that are rejected at each depth, checkpoints, ranks and stages, with and
without the draft of its checkpoint."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.model_executor.graph_stand_ins import in_graphs
from srt.model_executor.known_texts import KnownTexts, verifying_scheduler
from srt.model_executor.test_compressed_steps import plain, prompts, run, server_args
from srt.models.harness import random_tokens
from srt.models.v41_drafts import save_v41_draft

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "pp3": {"pp_size": 3},
    "tp2 x pp2": {"tp_size": 2, "pp_size": 2},
    "tp2, halves": {"tp_size": 2, "enable_two_batch_overlap": True, "two_batch_overlap_min_tokens": 2},
}
QUICK = {(3, True)}
DRAFT = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41")
    save_v41_draft(folder)
    return folder


@pytest.mark.parametrize(
    ("spoil_every", "graphs"),
    some_of([(1, False), (2, False), (3, False), (4, False), (3, True), (0, False)], QUICK),
)
def test_draft_tokens_are_taken_back(spoil_every: int, graphs: bool, folder: Path) -> None:
    args = server_args(folder)
    want = run(plain(args), prompts())
    outputs = {tuple(ids): tokens for ids, tokens in zip(prompts(), want, strict=True)}
    scheduler = verifying_scheduler(args, KnownTexts(4, spoil_every), outputs)
    with contextlib.ExitStack() as stack:
        if graphs:
            stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4), (16,), (0, 4))))
        assert run(scheduler, prompts()) == want
        assert run(scheduler, prompts()) == want, "with prompts and outputs from the cache"


@pytest.mark.thorough
def test_the_next_turn_goes_on_from_a_checkpoint(folder: Path) -> None:
    args = server_args(folder)
    scheduler = plain(args)
    first = run(scheduler, prompts()[2:], 20)[0]
    turn = [*prompts()[2], *first, *random_tokens(9, seed=5)]
    assert run(scheduler, [turn]) == run(plain(args), [turn])


def _rank(rank: int, args: ServerArgs, folder: Path) -> None:
    torch.set_num_threads(1)
    runner = create_runner(args, rank, f"file://{folder}/rendezvous")
    torch.save(run(Scheduler(args, runner, StopChecker(None)), prompts()), folder / f"{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("layout", "drafts"),
    [
        pytest.param(layout, drafts, marks=[] if (layout, drafts) == ("pp2", True) else pytest.mark.thorough)
        for layout in LAYOUTS
        for drafts in (False, True)
    ],
)
def test_ranks_give_the_tokens_of_one(layout: str, drafts: bool, folder: Path, tmp_path: Path) -> None:
    args = replace(server_args(folder, **LAYOUTS[layout]), **(DRAFT if drafts else {}))
    want = run(plain(server_args(folder)), prompts())
    count = args.tp_size * args.pp_size
    run_ranks(_rank, (args, tmp_path), count)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)] == [want] * count
