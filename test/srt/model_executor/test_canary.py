"""The start-up canary: quiet on sound runners, and each seeded defect is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.mem_cache.layerwise_load import LayerWaits
from sglang.srt.model_executor import graph_runner
from sglang.srt.model_executor.canary import check_runner
from sglang.srt.model_executor.device_state import StepShape, shape_of
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import StepInput
from sglang.srt.model_executor.two_batch_overlap import Microbatches, TwoBatchOverlap
from sglang.srt.server_args import ServerArgs
from srt.layers.attention.decode_steps import reexecuting_capture
from srt.layers.attention.fake_flashinfer import FakeWrapper
from srt.model_executor.backend_matrix import backend, faked_flashinfer
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.models.harness import save_tiny
from srt.models.media_harness import save_seeing, seeing_scheduler


def runner_of(name: str, folder: Path, **options: Any) -> ModelRunner:
    save_tiny(name, folder)
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_running_requests=4,
        skip_server_warmup=True, **options,
    )  # fmt: skip
    return create_runner(args)


class EagerInPlaceOfGraphs:
    """Replays are steps without a graph whose logits `spoil` changes."""

    def __init__(self, runner: ModelRunner, spoil: Callable[[StepInput, torch.Tensor], torch.Tensor]) -> None:
        self.runner, self.spoil = runner, spoil

    def shape_of(self, step: StepInput) -> StepShape:
        return shape_of(step)

    def writes_tables(self, step: StepInput) -> bool:
        return False

    def replay(self, shape: StepShape, step: StepInput) -> Any:
        with self.runner.without_graphs():
            logits = self.spoil(step, self.runner.forward(step).logits)
        sent = torch.from_numpy(step.sampled_slots)
        names = ("decode_slots", "decode_lens", "sampled_slots")
        arrays = {**dict.fromkeys(names, sent), "last_rows": torch.arange(len(sent))}
        batch = SimpleNamespace(positions=torch.zeros_like(sent), state_records=None)
        return SimpleNamespace(batch=batch, arrays=arrays, hidden=logits, logits=logits, accept=None)


def capture_mixed(runner: ModelRunner, log: list[str], defect: str) -> None:
    """A model with windows: FlashInfer decodes and Triton computes prompts (stand-ins of both), in graphs of every
    kind."""
    with_attention(runner, backend("flashinfer", runner), DeviceLengths())
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(graph_runner, "capture", reexecuting_capture(log))
        graphs = runner.graphs = GraphRunner(runner.state, GraphSizes((1, 4), (16, 96), (0, 2)))
    if defect == "stale plan":
        refresh = graphs._refresh
        captured = [output.batch.decode for shape, output in graphs.outputs.items() if shape.has_prompts]
        graphs._refresh = lambda rows, lens: None if any(rows is c for c in captured) else refresh(rows, lens)  # type: ignore[method-assign]
    elif defect == "late table":
        runner.state.attention.decode_plans_on_host = False


@pytest.mark.parametrize(
    ("defect", "named"),
    [
        ("", ""),
        ("stale plan", "the graph of prompts beside a request that decodes gives other logits"),
        ("late table", "the graph that decodes 1 request gives other logits"),
    ],
)
def test_a_plan_that_does_not_follow_a_graph_is_found(
    defect: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that plans on the host, without a stand-in that notices: its plan is of another step where a graph with
    prompts does not refresh it, and misses the new token where the graph writes a window's table only afterwards."""
    monkeypatch.setattr(FakeWrapper, "checks_lists", False)
    runner = runner_of("gemma3", tmp_path)
    with faked_flashinfer() as log:
        capture_mixed(runner, log, defect)
        if not defect:
            check_runner(runner)
            return
        with pytest.raises(UserError, match=named):
            check_runner(runner)


@pytest.mark.parametrize("defect", [False, True])
def test_a_step_as_two_halves_is_computed_once_and_its_defect_is_named(defect: bool, tmp_path: Path) -> None:
    runner = runner_of("qwen3", tmp_path)
    two_batch_overlap = runner.two_batch_overlap = TwoBatchOverlap(runner.state, parallel_state.groups(), 4096)
    compute, tokens = two_batch_overlap.compute, []

    def watched(batch: ForwardBatch, both: Microbatches, loads: LayerWaits | None) -> torch.Tensor:
        tokens.append([len(half.out_cache_loc) for half in both])
        hidden = compute(batch, both, loads)
        return hidden.flip(0) if defect else hidden

    two_batch_overlap.compute = watched  # type: ignore[method-assign]
    if defect:
        with pytest.raises(UserError, match="a step as two microbatches gives other .* --disable-two-batch-overlap"):
            check_runner(runner)
    else:
        check_runner(runner)
    assert len(tokens) == 1 and min(tokens[0]) > 0
    assert two_batch_overlap.min_tokens == 4096


def test_the_first_block_without_numbers_is_named(tmp_path: Path) -> None:
    runner = runner_of("qwen3", tmp_path)
    for layer in (1, 2):
        join, block = runner.model.layers[layer].blocks[1]
        runner.model.layers[layer].blocks[1] = (join, lambda x, batch, block=block: block(x, batch) / 0)
    with pytest.raises(
        UserError, match=r"the output of layer 1 mlp \(linear by torch_native, silu_and_mul by torch_native\) is not"
    ):
        check_runner(runner)


def test_a_block_that_decodes_otherwise_is_named(tmp_path: Path) -> None:
    """As a decode kernel would that takes a cache's bytes for another type."""
    runner = runner_of("qwen3", tmp_path)
    join, block = runner.model.layers[1].blocks[0]

    def wrong(x: torch.Tensor, batch: Any) -> torch.Tensor:
        out: torch.Tensor = block(x, batch)
        return out if batch.decode is None else out.flip(-1) * 100

    runner.model.layers[1].blocks[0] = (join, wrong)
    with pytest.raises(UserError, match="layer 1 attn .* gives another output for a token that is decoded") as error:
        check_runner(runner)
    assert "decode_attention by torch_native" in str(error.value) and "silu" not in str(error.value)


def test_an_all_reduce_that_loses_a_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("qwen3", tmp_path)
    monkeypatch.setattr(parallel_state, "tp_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "all_reduce", lambda x: x)
    with pytest.raises(UserError, match=r"all_reduce: \d+ of 512 sums over 2 ranks are wrong"):
        check_runner(runner)


def test_a_start_runs_it_unless_it_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3", tmp_path)
    seen: list[object] = []
    monkeypatch.setattr("sglang.srt.model_executor.canary.check_runner", seen.append)
    common = SimpleNamespace(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=256)
    create_runner(ServerArgs.from_kwargs(**vars(common), skip_server_warmup=True))
    assert not seen
    create_runner(ServerArgs.from_kwargs(**vars(common)))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("defect", "named"),
    [
        ("", ""),
        ("no features", "the graph of prompts with images gives other logits"),
        ("an earlier row", "the graph of prompts with images beside a request that decodes gives other logits"),
    ],
)
def test_graphs_that_misplace_features_are_named(defect: str, named: str, tmp_path: Path) -> None:
    """A mask that names none, or that forgets the requests that decode in front."""
    save_seeing("qwen3_vl", tmp_path)
    runner = seeing_scheduler(tmp_path, max_running_requests=4).runner
    with_attention(runner, DeviceLengths(), DeviceLengths())
    with in_graphs(runner, GraphSizes((1, 4), (16, 96), (0, 2))):
        media = runner.graphs.media
        load = media.load

        def spoiled(step: StepInput) -> dict[str, Any]:
            values = load(step)
            if "is_media" in values:
                wrong = {"no features": np.zeros_like, "an earlier row": lambda mask: np.roll(mask, -step.num_decodes)}
                values["is_media"] = wrong[defect](values["is_media"])
            return values

        media.load = spoiled if defect else load
        if not defect:
            check_runner(runner)
        else:
            with pytest.raises(UserError, match=named):
                check_runner(runner)
    assert not runner.state.features.usage()["items"] and not runner.state.features.used
