"""What follows the sampling of a step, in a graph of its own and without one: it reads what the step's graph has
computed, never what the capture of that graph has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_capture import StaticOutput
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.plan.step_widths import StepWidths
from srt.model_executor.graph_stand_ins import (
    DeviceLengths,
    PoisonedGraph,
    StepInPlaceOfGraph,
    in_graphs,
    with_attention,
)
from srt.model_executor.test_verify_steps import GREEDY, run, server_args
from srt.models.harness import save_tiny


class PlansOnHost(DeviceLengths):
    """As FlashInfer does for requests that decode."""

    plans_on_host = True

    def refresh(self, rows: Any) -> None:
        assert len(rows.seq_lens_cpu) == len(rows)


@pytest.mark.parametrize(
    ("capture", "decode", "mixed"),
    [(PoisonedGraph, DeviceLengths, (0, 4, 8)), (StepInPlaceOfGraph, PlansOnHost, (0,))],
    ids=["graph", "eager"],
)
def test_drafts_follow_the_graph_of_their_step(
    capture: Any, decode: Any, mixed: tuple[int, ...], tmp_path: Path
) -> None:
    """Prompts whose tokens are no size of a graph included. Without a graph of their own drafts follow that of the
    step, whose rows they compute."""
    save_tiny("qwen3", tmp_path)
    plain_args = server_args(tmp_path, chunked_prefill_size=16)
    plain = run(Scheduler(plain_args, create_runner(plain_args), StopChecker(None)), GREEDY)
    args = server_args(
        tmp_path, chunked_prefill_size=16, speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path), speculative_num_steps=2,
    )  # fmt: skip
    scheduler = Scheduler(args, create_runner(args), StopChecker(None))
    with_attention(scheduler.runner, decode(), DeviceLengths())
    with in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), mixed), capture) as replays:
        assert run(scheduler, GREEDY) == plain
    assert any(step.prompts is not None for step in replays)


@pytest.mark.parametrize("widths", [(1,), (2, 5), (1, 3, 4, 7)])
def test_graphs_of_the_most_rows_are_captured_first(widths: tuple[int, ...]) -> None:
    """A graph's logits lie in a static output if they are many, and their width depends on their number: whichever
    number is the first of a width, none behind it is larger."""
    runner = object.__new__(GraphRunner)
    runner.sizes = GraphSizes((1, 2, 4, 8, 12, 16), (16, 64), (0, 4, 8), StepWidths(widths))
    for prompts in (True, False):
        rows = [shape.num_tokens for shape in runner._plain_shapes() if shape.has_prompts == prompts]
        assert rows == sorted(rows, reverse=True)


def test_a_static_output_never_moves() -> None:
    output = StaticOutput()
    first = output.keep(torch.ones(4, 3))
    assert output.keep(torch.zeros(2, 3)).data_ptr() == first.data_ptr()
    with pytest.raises(AssertionError, match="captured first"):
        output.keep(torch.ones(5, 3))
