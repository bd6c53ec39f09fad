"""Drafts on a GPU, in graphs and without: Markov heads of every kind, and what DeepSeek-V4's checkpoints bring."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from sglang.embedded import DEFAULT_MODEL_PATH
from srt.managers.gpu_parity import error_over_bf16, gpu_scheduler
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, answers, run, server_args
from srt.models import test_dspark_drafts as dspark_drafts
from srt.models.depth_drafts import build_depths
from srt.models.harness import WIDE, save_tiny
from srt.models.muse_assistant import BLOCK, save_assistant
from srt.models.test_eagle3_drafts import save
from srt.models.v4_drafts import save_v4
from srt.speculative.test_draft_block import OF_THE_EMBEDDED_MODEL, draft_tokens, scheduler_of

pytestmark = pytest.mark.gpu

LAUNCHES: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"disable_cuda_graph": True}}
ON_GPU: dict[str, Any] = {"device": "cuda", "cuda_graph_max_bs": 8, "mem_fraction_static": 0.2}


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """A scheduler's graphs go with the garbage collector, which must not find them while a later test captures one."""
    yield
    gc.collect()


def same_share(of_gpu: dict[tuple[str, int], list[int]], of_cpu: dict[tuple[str, int], list[int]]) -> float:
    """Returns the share of draft tokens that agree, of steps with the same last token."""
    rows = [(row, of_gpu[key]) for key, row in of_cpu.items() if key in of_gpu and row[0] == of_gpu[key][0]]
    same = [a == b for row, other in rows for a, b in zip(row[1:], other[1:], strict=True)]
    assert len(same) > 100
    return sum(same) / len(same)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("kind", dspark_drafts.KINDS)
def test_markov_heads(kind: str, launch: str, tmp_path: Path) -> None:
    """The embedded model's answers are the plain run's, and a random draft's draft tokens the CPU's but for
    rounding."""
    keys = {key: value for key, value in OF_THE_EMBEDDED_MODEL.items() if key != "dflash_config"}
    config = dspark_drafts.CONFIG | keys | {"target_layer_ids": [1, 4], "markov_rank": 32, "markov_head_type": kind}
    tensors = dspark_drafts.weights(config)
    flags = {
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": str(save(tmp_path / "draft", config, tensors)),
    }
    model = Path(DEFAULT_MODEL_PATH)
    on_gpu = ON_GPU | LAUNCHES[launch]
    for params in (GREEDY, SAMPLED):
        plain = answers(scheduler_of(server_args(model, **on_gpu)), params)
        assert answers(scheduler_of(server_args(model, **on_gpu, **flags)), params) == plain
    _, of_gpu = draft_tokens(server_args(model, **on_gpu, **flags))
    _, of_cpu = draft_tokens(server_args(model, dtype="float32", **flags))
    assert same_share(of_gpu, of_cpu) > 0.75


ROUNDING = 0.6
"""Least share of draft tokens that 16 bits and a graph leave as they are: random weights have near ties everywhere."""


def by_depth(name: str, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    return build_depths(name, folder).target.model, {"speculative_algorithm": "NEXTN"}


def with_assistant(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    save_assistant(folder / "draft", **WIDE, target_layer_ids=[0, 1, 3])
    draft = {"speculative_draft_model_path": str(folder / "draft"), "speculative_num_draft_tokens": BLOCK}
    return save_tiny("muse_glimmer_wide", folder), {"speculative_algorithm": "DFLASH", **draft}


OF_FAMILIES: dict[str, Callable[[Path], tuple[PreTrainedModel, dict[str, Any]]]] = {
    **{name: partial(by_depth, name) for name in ("inkling_wide", "mimo_v2_wide", "step3p7_wide")},
    "muse_glimmer_wide": with_assistant,
}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_drafts_of_families(family: str, launch: str, tmp_path: Path) -> None:
    """As `test_drafts_of_deepseek_v4`, of a layer for each depth, and of Muse-Glimmer's assistant."""
    reference, flags = OF_FAMILIES[family](tmp_path)
    assert error_over_bf16(gpu_scheduler(tmp_path, **flags, **LAUNCHES[launch]), reference.cuda()) < 1.5
    _, of_gpu = draft_tokens(server_args(tmp_path, **ON_GPU, **flags, **LAUNCHES[launch]), run)
    _, of_cpu = draft_tokens(server_args(tmp_path, dtype="float32", **flags), run)
    assert same_share(of_gpu, of_cpu) > ROUNDING


V4_DRAFTS = {"NEXTN": False, "DSPARK": True}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("algorithm", V4_DRAFTS)
def test_drafts_of_deepseek_v4(algorithm: str, launch: str, tmp_path: Path) -> None:
    """What is generated with drafts is the model's own, by its log probabilities; the draft tokens are the CPU's."""
    reference = save_v4(tmp_path, V4_DRAFTS[algorithm], "deepseek_v4_wide").target.model.cuda()
    flags = {"speculative_algorithm": algorithm, "page_size": 64}
    assert error_over_bf16(gpu_scheduler(tmp_path, **flags, **LAUNCHES[launch]), reference) < 1.5
    _, of_gpu = draft_tokens(server_args(tmp_path, **ON_GPU, **flags, **LAUNCHES[launch]), run)
    _, of_cpu = draft_tokens(server_args(tmp_path, dtype="float32", **flags), run)
    assert same_share(of_gpu, of_cpu) > ROUNDING
