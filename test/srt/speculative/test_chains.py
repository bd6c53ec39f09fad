"""Draft models behind a real scheduler: whatever a draft proposes, tokens are those of the plain run, in graphs and
without; and a draft that is its own target is nearly always right."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.device_state import DeviceState
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, accepted, answers, prompts, run, server_args
from srt.models.harness import save_tiny

SAMPLED_PLAINLY = {"temperature": 1.0}


def scheduler_of(args: ServerArgs) -> Scheduler:
    return Scheduler(args, create_runner(args), StopChecker(None))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("qwen3", SAMPLED),
        ("qwen3", SAMPLED_PLAINLY),
        ("deepseek_v3", GREEDY),
        pytest.param("glm_moe_dsa", GREEDY, marks=pytest.mark.thorough),
        pytest.param("minimax_m3", GREEDY, marks=pytest.mark.thorough),
        ("qwen3_windows", GREEDY),
    ],
)
def test_a_target_that_drafts_for_itself(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    """Its draft tokens are drawn with the noise of the target: all are right, but for the last tokens of a request."""
    save_tiny(name, tmp_path)
    plain = run(scheduler_of(server_args(tmp_path, chunked_prefill_size=16)), params)
    args = server_args(
        tmp_path, chunked_prefill_size=16, speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path), speculative_num_steps=3,
    )  # fmt: skip
    for graphs in (False, True):
        scheduler = scheduler_of(args)
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            counts = accepted(scheduler)
            assert run(scheduler, params) == plain
            assert run(scheduler, params) == plain, "with prompts and outputs from the cache"
        assert all(width == count for width, count in counts) and {width for width, _ in counts} >= {4}


def test_a_step_that_samples_nothing_computes_no_rows_of_draft_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a prompt's chunk alone: kernels cannot be launched over no rows."""
    save_tiny("qwen3", tmp_path)
    sizes: list[int] = []
    draft_batch = DeviceState.draft_batch

    def counted(state: DeviceState, ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        sizes.append(len(ids))
        return draft_batch(state, ids, *others, **named)

    monkeypatch.setattr(DeviceState, "draft_batch", counted)
    args = server_args(
        tmp_path, chunked_prefill_size=16, speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tmp_path), speculative_num_steps=3,
    )  # fmt: skip
    scheduler, collector = scheduler_of(args), Collector()
    add(scheduler, request("a", prompts()[6], 4, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert len(prompts()[6]) > 16 and sizes and min(sizes) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_target_that_drafts_for_itself_on_a_gpu(params: dict[str, Any]) -> None:
    """The embedded model is certain of its answers; products of other heights round otherwise."""
    options: dict[str, Any] = {"device": "cuda", "cuda_graph_max_bs": 8, "mem_fraction_static": 0.2}
    folder = Path(DEFAULT_MODEL_PATH)
    plain = answers(scheduler_of(server_args(folder, **options)), params)
    options |= {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder), "speculative_num_steps": 3,
    }  # fmt: skip
    scheduler = scheduler_of(server_args(folder, **options))
    assert scheduler.runner.graphs is not None and scheduler.runner.graphs.drafts is not None
    counts = accepted(scheduler)
    assert answers(scheduler, params) == plain
    assert sum(count for _, count in counts) > 0.9 * sum(width for width, _ in counts)
