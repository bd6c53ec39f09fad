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
from sglang.srt.plan.speculation import step_widths
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import checkpoint

FP32 = 4


def planned(tmp_path: Path, *words: str) -> tuple[Plan, Sizes]:
    """Returns the plan of Qwen3-8B on a card with 94 GiB, and its sizes."""
    checkpoint("qwen3", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    args = ServerArgs.from_cli(["--model-path", str(tmp_path), *words])
    model = ModelConfig.from_server_args(args)
    plan = make_plan(args, model, arch_by_name("rtx-pro-6000-server"), 94 << 30, frozenset({"triton"}))
    sizes = Sizes(
        plan.max_running_requests, plan.context_len, 64, plan.cuda_graph_bs, plan.page_size, plan.ranks,
        plan.cuda_graph_prefill_tokens, widths=step_widths(args, model.architecture),
    )  # fmt: skip
    return plan, sizes


def eager_rows(plan: Plan, widths: tuple[int, ...]) -> int:
    """Returns the most rows of a step that `compile_decodes` launches kernel by kernel."""
    rows: list[int] = []

    def run(step: StepInput) -> Any:
        rows.append(len(step.slots) * step.width)
        return SimpleNamespace(wait=lambda: None)

    runner: Any = SimpleNamespace(
        plan=plan, widths=widths, run=run, decodes_in_graph=lambda num: num <= plan.cuda_graph_bs[-1],
        without_graphs=contextlib.nullcontext, state=SimpleNamespace(has_drafts=widths != (1,), lens=[0]),
    )  # fmt: skip
    ModelRunner.compile_decodes(runner)
    return max(rows, default=0)


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
    graphs.sizes = graph_sizes(plan, state, sizes.widths)
    without_prompts = [shape for shape in graphs._shapes() if not shape.has_prompts]
    assert len(without_prompts) == sizes.num_decode_graphs
    assert max(shape.num_tokens for shape in without_prompts) == sizes.graph_rows
    assert eager_rows(plan, sizes.widths) in (0, sizes.decode_rows)
    vocabulary, memory = plan.description.vocab_size, plan.memory
    assert memory.logits == logits_bytes(plan.description, sizes.decode_rows, plan.ranks)
    assert memory.logits >= sizes.decode_rows * vocabulary * FP32
    assert memory.graphs == graph_bytes(plan.description, "bfloat16", sizes)
    assert memory.graphs >= 2 * sizes.graph_rows * vocabulary * FP32 + len(list(graphs._shapes())) * 6 * MIB
