"""The rows of logits and the graphs that the memory plan counts are those that the runner captures and launches."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.model_executor.graph_runner import GraphRunner, graph_sizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import StepInput
from sglang.srt.plan.memory import MIB, graph_bytes, logits_bytes
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.speculation import speculative_settings, step_widths
from sglang.srt.plan.step_widths import VERIFY_ROWS, StepWidths
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import checkpoint

FP32 = 4


LARGE_CARD, SMALL_CARD = ("rtx-pro-6000-server", 94 << 30), ("rtx-5090", 31 << 30)


def planned(tmp_path: Path, *words: str, card: tuple[str, int] = LARGE_CARD) -> tuple[Plan, Sizes]:
    """Returns the plan of Qwen3-8B on a card, and its sizes."""
    checkpoint("qwen3", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    args = ServerArgs.from_cli(["--model-path", str(tmp_path), *words])
    model = ModelConfig.from_server_args(args)
    plan = make_plan(args, model, arch_by_name(card[0]), card[1], frozenset({"triton"}))
    sizes = Sizes(
        plan.max_running_requests, plan.context_len, 64, plan.cuda_graph_bs, plan.page_size, plan.ranks,
        plan.cuda_graph_prefill_tokens, drafts=step_widths(speculative_settings(args, model.architecture)),
    )  # fmt: skip
    return plan, sizes


def eager_steps(plan: Plan, widths: StepWidths) -> list[tuple[int, int]]:
    """Returns the requests and the tokens of each of the steps that `compile_decodes` launches kernel by kernel."""
    steps: list[tuple[int, int]] = []

    def run(step: StepInput) -> Any:
        steps.append((len(step.slots), step.width))
        return SimpleNamespace(wait=lambda: None)

    runner: Any = SimpleNamespace(
        plan=plan, widths=widths, run=run, decodes_in_graph=lambda num: num <= plan.cuda_graph_bs[-1],
        without_graphs=contextlib.nullcontext, state=SimpleNamespace(has_drafts=widths.widths != (1,), lens=[0]),
    )  # fmt: skip
    ModelRunner.compile_decodes(runner)
    return steps


def eager_rows(plan: Plan, widths: StepWidths) -> int:
    """Returns the most rows of a step that `compile_decodes` launches kernel by kernel."""
    return max((requests * width for requests, width in eager_steps(plan, widths)), default=0)


def test_every_width_is_compiled_at_the_fewest_requests_without_a_graph(tmp_path: Path) -> None:
    """With the most requests that may run a step has few widths, and kernels are launched otherwise for a few."""
    plan, _ = planned(tmp_path, "--speculative-algorithm", "NGRAM", "--cuda-graph-max-bs", "8")
    widths, largest = plan.step_widths, plan.cuda_graph_bs[-1]
    assert largest == 8 and widths.of(largest + 1) != widths.of(plan.max_running_requests)
    assert {(largest + 1, width) for width in widths.of(largest + 1)} <= set(eager_steps(plan, widths))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--speculative-algorithm", "NGRAM"),
        ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16"),
    ],
    ids=["no drafts", "adaptive", "16 tokens"],
)
def test_the_plan_counts_the_rows_of_verify_steps(words: tuple[str, ...], tmp_path: Path) -> None:
    plan, sizes = planned(tmp_path, *words)
    attention = SimpleNamespace(decode_in_graphs=True, extend_in_graphs=True, decode_plans_on_host=False)
    state: Any = SimpleNamespace(attention=attention, has_drafts=bool(words))
    graphs = object.__new__(GraphRunner)
    graphs.sizes = graph_sizes(plan, state, plan.step_widths)
    without_prompts = [shape for shape in graphs._plain_shapes() if not shape.has_prompts]
    assert len(without_prompts) == sizes.num_decode_graphs
    assert max(shape.num_tokens for shape in without_prompts) == sizes.graph_rows
    assert plan.step_widths == sizes.step_widths
    assert eager_rows(plan, plan.step_widths) <= sizes.decode_rows == plan.decode_rows
    vocabulary, memory = plan.description.vocab_size, plan.memory
    assert memory.logits == logits_bytes(plan.description, sizes.decode_rows, plan.ranks)
    assert memory.logits >= sizes.decode_rows * vocabulary * FP32
    assert memory.graphs == graph_bytes(plan.description, "bfloat16", sizes)
    assert memory.graphs >= 2 * sizes.graph_rows * vocabulary * FP32 + len(list(graphs._plain_shapes())) * 6 * MIB


NGRAM = ("--speculative-algorithm", "NGRAM")


@pytest.mark.parametrize("card", [LARGE_CARD, SMALL_CARD], ids=str)
@pytest.mark.parametrize("more", [(), ("--speculative-num-draft-tokens", "16")], ids=["adaptive", "16 tokens"])
def test_drafts_leave_most_of_the_cache(card: tuple[str, int], more: tuple[str, ...], tmp_path: Path) -> None:
    """Rows of logits are those of many requests with few draft tokens, or of few with many."""
    plain, _ = planned(tmp_path, card=card)
    drafts, _ = planned(tmp_path, *NGRAM, *more, card=card)
    assert drafts.max_running_requests == plain.max_running_requests
    assert drafts.decode_rows == max(plain.max_running_requests, VERIFY_ROWS)
    assert drafts.max_total_num_tokens > 0.8 * plain.max_total_num_tokens


@pytest.mark.parametrize("chooses", [True, False])
@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8, 16, 32, 64, 96, 128)], ids=["no graphs", "graphs"])
@pytest.mark.parametrize("max_requests", [8, 100, 600])
def test_no_step_has_more_rows_than_planned(max_requests: int, graphs: tuple[int, ...], chooses: bool) -> None:
    graphs = tuple(size for size in graphs if size <= max_requests)
    widths = StepWidths((1, 2, 4, 6, 12), chooses).limited(max_requests, graphs)
    most, widest = widths.step_rows(max_requests), []
    for num in range(1, max_requests + 1):
        allowed, padded = widths.of(num), next((size for size in graphs if size >= num), num)
        assert padded * max(allowed) <= most
        assert len(allowed) == 1 or chooses
        widest.append(widths.widest(num))
    assert widest == sorted(widest, reverse=True) and widest[0] == 12
    assert max_requests < 600 or widest[-1] == 1
