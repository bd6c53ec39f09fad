"""Block drafts behind a real scheduler: tokens are those of the plain run, whatever the target and the draft have."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, run, server_args
from srt.models.harness import save_tiny
from srt.models.test_dflash_drafts import CONFIG, weights
from srt.models.test_eagle3_drafts import save

TARGETS = (
    "llama", "qwen3_windows", "mistral_windows", "gemma3", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt_oss",
)  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}


def draft_of(target: Path, folder: Path, **keys: Any) -> ServerArgs:
    captures = {"dflash_config": {"mask_token_id": 201, "target_layer_ids": [0, 1]}}
    draft = save(folder, CONFIG | captures | keys, weights())
    return server_args(
        target, speculative_algorithm="DFLASH", speculative_draft_model_path=str(draft), chunked_prefill_size=16
    )


def scheduler_of(args: ServerArgs) -> Scheduler:
    return Scheduler(args, create_runner(args), StopChecker(None))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_are_those_of_the_plain_run(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny(name, target)
    plain = run(scheduler_of(server_args(target, chunked_prefill_size=16)), params)
    args = draft_of(target, tmp_path / "draft", **(WINDOWS if name == "llama" else {}))
    for graphs in (False, True):
        scheduler = scheduler_of(args)
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            assert run(scheduler, params) == plain
            assert run(scheduler, params) == plain, "with prompts and outputs from the cache"
