"""Block drafts behind a real scheduler: tokens are those of the plain run, whatever the target and the draft have.

`make test` has a target with each kind of cache but states, which `test_draft_matrix` has, greedily or sampled; `make
thorough` has every target with every draft and parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some_of
from rank_processes import run_ranks

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.speculative import AdaptiveSettings
from sglang.srt.distributed import parallel_state
from sglang.srt.drafts.block.drafter import DraftBlock
from sglang.srt.drafts.depth import AdaptiveDepth
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan, create_runner
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.server_args import ServerArgs
from srt.model_executor.graph_stand_ins import DeviceLengths, in_graphs, with_attention
from srt.model_executor.test_verify_steps import GREEDY, SAMPLED, answers, run, server_args
from srt.models import test_dspark_drafts as dspark_drafts
from srt.models.harness import save_tiny
from srt.models.test_dflash_drafts import BLOCK, CONFIG, weights
from srt.models.test_eagle3_drafts import save
from srt.models.v4_drafts import save_v4

TARGETS = (
    "llama", "qwen3_windows", "mistral_windows", "gemma3", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt_oss",
    "minimax_m3", "glm_moe_dsa", "deepseek_v4_small",
)  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}


def draft_of(target: Path, folder: Path, kind: str = "DFLASH", **keys: Any) -> ServerArgs:
    if kind == "DFLASH":
        config = CONFIG | {"dflash_config": {"mask_token_id": 201, "target_layer_ids": [0, 1]}} | keys
        draft = save(folder, config, weights())
    else:
        config = dspark_drafts.CONFIG | {"target_layer_ids": [0, 1], "markov_head_type": "rnn"} | keys
        draft = save(folder, config, dspark_drafts.weights(config))
    return server_args(
        target, speculative_algorithm=kind, speculative_draft_model_path=str(draft), chunked_prefill_size=16
    )


def scheduler_of(args: ServerArgs) -> Scheduler:
    return Scheduler(args, create_runner(args), StopChecker(None))


FOR_CI = {
    ("llama", "DFLASH", "greedy"),
    ("deepseek_v3", "DFLASH", "sampled"),
    ("minimax_m3", "DFLASH", "greedy"),
    ("glm_moe_dsa", "DFLASH", "greedy"),
    ("qwen3_windows", "DSPARK", "sampled"),
}
"""Pairs of target and draft, with parameters, that run every time; the others run on demand."""
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalized": {"temperature": 0.8, "presence_penalty": 1.2, "min_new_tokens": 9, "logit_bias": {"5": 2.0}},
}


@pytest.mark.parametrize(
    ("name", "kind", "params"), some_of(itertools.product(TARGETS, ("DFLASH", "DSPARK"), PARAMS), FOR_CI)
)
def test_tokens_are_those_of_the_plain_run(name: str, kind: str, params: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny(name, target)
    args = draft_of(target, tmp_path / "draft", kind, **(WINDOWS if name == "llama" else {}))
    check_tokens(server_args(target, chunked_prefill_size=16), args, PARAMS[params])


def check_tokens(without: ServerArgs, args: ServerArgs, params: dict[str, Any]) -> None:
    """Eager and in graphs, from prompts and from the cache: the tokens of a server that does not draft."""
    plain = run(scheduler_of(without), params)
    for graphs in (False, True):
        scheduler = scheduler_of(args)
        with contextlib.ExitStack() as stack:
            if graphs:
                with_attention(scheduler.runner, DeviceLengths(), DeviceLengths())
                stack.enter_context(in_graphs(scheduler.runner, GraphSizes((1, 4, 8), (16, 64), (0, 4, 8))))
            assert run(scheduler, params) == plain
            assert run(scheduler, params) == plain, "with prompts and outputs from the cache"


LAYOUTS = {"tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}


def _rank(rank: int, args: ServerArgs, layout: str, folder: Path) -> None:
    torch.set_num_threads(1)
    layout_args = replace(args, **LAYOUTS[layout])
    runner = create_runner(layout_args, rank, f"file://{folder}/rendezvous-{layout}")
    scheduler = Scheduler(layout_args, runner, StopChecker(None))
    torch.save([run(scheduler, GREEDY) for _ in range(2)], folder / f"{layout}{rank}.pt")
    parallel_state.shutdown()


V4_DRAFTS = {"DSPARK": True, "NEXTN": False}


@pytest.mark.thorough
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("algorithm", V4_DRAFTS)
def test_drafts_in_a_checkpoint_of_v4(algorithm: str, params: str, tmp_path: Path) -> None:
    save_v4(tmp_path, V4_DRAFTS[algorithm])
    args = server_args(tmp_path, speculative_algorithm=algorithm, chunked_prefill_size=16)
    check_tokens(replace(args, speculative_algorithm=None), args, PARAMS[params])


@pytest.mark.parametrize(
    ("kind", "layout"),
    some_of([("DFLASH", "tp2"), ("DFLASH", "pp2"), ("DSPARK", "tp2")], [("DFLASH", "pp2")]),
)
def test_two_ranks_give_the_tokens_of_one(kind: str, layout: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny("qwen3_windows", target)
    plain = run(scheduler_of(server_args(target, chunked_prefill_size=16)), GREEDY)
    run_ranks(_rank, (draft_of(target, tmp_path / "draft", kind), layout, tmp_path), 2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{layout}{rank}.pt") == [plain, plain], f"rank {rank}"


def test_as_many_draft_tokens_as_a_block_has_room_for(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny("qwen3", target)
    args = replace(draft_of(target, tmp_path / "draft"), speculative_num_draft_tokens=BLOCK + 1)
    with pytest.raises(UserError, match=f"blocks of {BLOCK} tokens.*--speculative-num-draft-tokens {BLOCK}"):
        create_plan(args)
    fewer = replace(args, speculative_num_draft_tokens=None, speculative_dflash_block_size=3)
    drafter = create_runner(fewer).drafter
    assert isinstance(drafter, DraftBlock) and drafter.num_tokens == 3 and drafter.lookahead_slots == BLOCK


def test_as_many_draft_tokens_as_a_block_has_rows(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_tiny("qwen3", target)
    args = draft_of(target, tmp_path / "draft", "DSPARK")
    drafter = create_runner(args).drafter
    assert isinstance(drafter, DraftBlock) and drafter.num_tokens == BLOCK + 1 and drafter.lookahead_slots == BLOCK
    more = replace(args, speculative_dspark_block_size=BLOCK + 1)
    with pytest.raises(UserError, match=f"blocks of {BLOCK} draft tokens.*--speculative-dspark-block-size {BLOCK}"):
        create_plan(more)
    shifted = draft_of(target, tmp_path / "shifted", "DSPARK", sample_from_anchor=False)
    with pytest.raises(UserError, match=f"blocks of {BLOCK - 1} draft tokens"):
        create_plan(replace(shifted, speculative_num_draft_tokens=BLOCK + 1))


@pytest.mark.parametrize(
    "params", [pytest.param(GREEDY, id="greedy", marks=pytest.mark.thorough), pytest.param(SAMPLED, id="sampled")]
)
def test_depths_by_a_confidence_head_change_no_token(params: dict[str, Any], tmp_path: Path) -> None:
    """Widths follow what the head says, and the requests get the tokens of the plain run."""
    target = tmp_path / "target"
    save_tiny("qwen3", target)
    args = draft_of(target, tmp_path / "draft", "DSPARK")
    plain = run(scheduler_of(server_args(target, chunked_prefill_size=16)), params)
    depth = Told(AdaptiveSettings(probe_interval=2, hysteresis=0.0), BLOCK + 1, STEP_MS)
    scheduler = Scheduler(args, create_runner(args), StopChecker(None), depth)
    assert run(scheduler, params) == plain
    assert run(scheduler, params) == plain
    assert len(depth.chosen) > 2 and all(len(row) == BLOCK for likely in depth.said for row in likely)


def _told_rank(rank: int, args: ServerArgs, folder: Path) -> None:
    torch.set_num_threads(1)
    runner = create_runner(replace(args, tp_size=2), rank, f"file://{folder}/rendezvous")
    depth = Told(AdaptiveSettings(probe_interval=2, hysteresis=0.0), BLOCK + 1, STEP_MS)
    scheduler = Scheduler(args, runner, StopChecker(None), depth)
    found = [run(scheduler, GREEDY), run(scheduler, SAMPLED)]
    torch.save((found, depth.said, depth.widths_in_turn, depth.confidence_cuts), folder / f"{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.thorough
def test_ranks_follow_a_confidence_head_alike(tmp_path: Path) -> None:
    """Every rank has the same numbers from the head, to the bit, so that all bring as many draft tokens to a step."""
    target = tmp_path / "target"
    save_tiny("qwen3", target)
    args = draft_of(target, tmp_path / "draft", "DSPARK")
    plain = scheduler_of(server_args(target, chunked_prefill_size=16))
    wanted = [run(plain, GREEDY), run(plain, SAMPLED)]
    run_ranks(_told_rank, (args, tmp_path), 2)
    (first, said, widths, cuts), second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first == wanted and second == (first, said, widths, cuts)
    assert len(set(widths)) > 2 and cuts > 0


STEP_MS = {(load, width): 4.0 + load * width for load in (1, 2, 4, 8) for width in range(1, BLOCK + 2)}


class Told(AdaptiveDepth):
    """Chooses by what the drafter says alone: what was right is not counted."""

    def __init__(
        self, settings: AdaptiveSettings, num_draft_tokens: int, step_ms: dict[tuple[int, int], float]
    ) -> None:
        super().__init__(settings, num_draft_tokens, step_ms)
        self.said: list[Sequence[Sequence[float]]] = []
        self.widths_in_turn: list[int] = []

    @property
    def chosen(self) -> set[int]:
        return set(self.widths_in_turn)

    def observe(self, widths: Sequence[int], counts: Sequence[int]) -> None:
        pass

    def expect(self, likely: Sequence[Sequence[float]]) -> None:
        self.said.append(likely)
        super().expect(likely)

    def next_width(self, num_requests: int) -> int:
        width = super().next_width(num_requests)
        self.widths_in_turn.append(width)
        return width


OF_THE_EMBEDDED_MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "vocab_size": 4096,
    "head_dim": 64,
    "intermediate_size": 128,
    "dflash_config": {"mask_token_id": 201, "target_layer_ids": [1, 4]},
}


def draft_tokens(
    args: ServerArgs, ask: Callable[[Scheduler, dict[str, Any]], dict[Any, list[int]]] = answers
) -> tuple[dict[Any, list[int]], dict[tuple[str, int], list[int]]]:
    """Returns what `ask` gets, greedily, and the draft tokens behind each token: by request and number."""
    scheduler = scheduler_of(replace(args, disable_overlap_schedule=True))
    seen: dict[tuple[str, int], list[int]] = {}
    process = scheduler.process

    def spy(batch: Any) -> None:
        process(batch)
        for req in batch.sampled:
            if req.finish is None:
                seen[req.rid, req.output_len] = scheduler.runner.state.next_tokens[req.slot].tolist()

    scheduler.process = spy  # type: ignore[method-assign]
    return ask(scheduler, GREEDY), seen


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}, {"page_size": 16}])
def test_draft_tokens_on_a_gpu_are_those_of_the_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    """But for the few that rounding to 16 bits turns; only steps with the same last token are compared."""
    draft = save(tmp_path / "draft", CONFIG | OF_THE_EMBEDDED_MODEL, weights(CONFIG | OF_THE_EMBEDDED_MODEL))
    flags = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(draft)}
    on_gpu = {"device": "cuda", "cuda_graph_max_bs": 8, "mem_fraction_static": 0.2, **options}
    plain = answers(scheduler_of(server_args(Path(DEFAULT_MODEL_PATH), **on_gpu)), GREEDY)
    tokens, of_gpu = draft_tokens(server_args(Path(DEFAULT_MODEL_PATH), **on_gpu, **flags))
    assert tokens == plain
    _, of_cpu = draft_tokens(server_args(Path(DEFAULT_MODEL_PATH), dtype="float32", **flags))
    rows = [(row, of_gpu[key]) for key, row in of_cpu.items() if key in of_gpu and row[0] == of_gpu[key][0]]
    same = [a == b for row, other in rows for a, b in zip(row[1:], other[1:], strict=True)]
    assert len(same) > 200 and sum(same) > 0.85 * len(same)
