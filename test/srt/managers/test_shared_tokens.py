"""Ranks that share out the tokens of their caches (--dcp-size) take the decisions of one process with pages of the same
size, and give its tokens: the schedule of `test_parallel_schedules`, for every kind of model, with and without graphs
and draft tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.model_executor.backend_matrix import backend, faked_flashinfer
from srt.model_executor.graph_stand_ins import DeviceLengths
from srt.models.harness import save_tiny
from srt.speculative.test_draft_matrix import DRAFTERS

from .test_parallel_schedules import NEW_TOKENS, Attention, Outcome, outcome

DCP2, DCP4 = RankLayout(2, dcp_size=2), RankLayout(4, dcp_size=4)
TP4_DCP2 = RankLayout(4, dcp_size=2)
ONE_KV_HEAD = {"num_key_value_heads": 1}
AG_RS = {"dcp_comm_backend": "ag_rs"}
DRAFTED = {"deepseek_v3": ("DCP2", "DCP4", "TP4 x DCP2"), "glm_moe_dsa": ("DCP2",), "qwen3": ("TP4 x DCP2",)}
"""Models with each drafter, and their layouts."""
DRAFT_TOKENS = {"speculative_num_draft_tokens": 3}


@dataclass(frozen=True)
class Case:
    """A tiny model ("": the embedded one), its layout, and flags."""

    tiny: str
    ranks: RankLayout
    changes: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    draft_tokens: bool = False
    thorough: bool = True
    tokens_only: bool = False
    """Decisions are other ones than those of one process; perhaps no request goes back to the queue."""
    drafts: str = ""
    """Drafter of the ranks, of `DRAFTERS`; one process does not draft."""
    flashinfer: tuple[str, ...] = ()
    """What its attention to latents computes on the ranks, of "decode" and "prompts"; plain torch the rest."""

    @property
    def rounds(self) -> int:
        """Without graphs, and with them: there are none of drafts whose attention is planned on the host."""
        return 1 if self.flashinfer and self.drafts else 2


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek_v3", {}),
    "selected latents": ("deepseek_v32", {}),
    "dense": ("qwen3", ONE_KV_HEAD),
    "experts": ("qwen3_moe", ONE_KV_HEAD),
    "states": ("qwen3_next", {**ONE_KV_HEAD, "linear_num_key_heads": 4}),
    "delta attention": ("kimi_linear", {}),
    "windows": ("qwen3_windows", ONE_KV_HEAD),
    "chunks": ("llama4", ONE_KV_HEAD),
    "sinks": ("gpt_oss", ONE_KV_HEAD),
}
WITH_STATES, OTHER_DECISIONS = ("states", "delta attention"), ("sinks", "chunks", "windows, DCP4")
"""Models whose pages would be longer; those whose windows have another share of the memory where tokens take less: with
four ranks 56 window tokens and not 80."""
LAYOUTS = {"DCP2": DCP2, "DCP4": DCP4, "TP4 x DCP2": TP4_DCP2}
QUICK = ("latents, DCP2, draft tokens", "dense, DCP2, draft tokens")
CASES = {
    f"{kind}, {layout}{', draft_tokens' * draft_tokens}": Case(
        *(tiny, ranks, changes, {"page_size": ranks.dcp_size} if kind in WITH_STATES else {}),
        draft_tokens=draft_tokens,
        thorough=f"{kind}, {layout}{', draft_tokens' * draft_tokens}" not in QUICK,
        tokens_only=bool({kind, f"{kind}, {layout}"} & {*OTHER_DECISIONS}),
    )
    for kind, (tiny, changes) in KINDS.items()
    for layout, ranks in LAYOUTS.items()
    for draft_tokens in (False, True)
}
CASES |= {
    "latents, ag_rs": Case("deepseek_v3", TP4_DCP2, flags=AG_RS),
    "latents, EP2": Case("deepseek_v3", RankLayout(2, 2, dcp_size=2)),
    "latents, TP3": Case("deepseek_v2_lite", RankLayout(3, dcp_size=3), flags={"chunked_prefill_size": 15}),
    "latents, PP2": Case("deepseek_v3", RankLayout(2, pp_size=2, dcp_size=2), tokens_only=True),
    "latents, pages": Case("deepseek_v3", DCP2, flags={"page_size": 4}),
    "selected latents, ag_rs": Case("deepseek_v32", DCP2, flags=AG_RS),
    "shared selections, draft tokens": Case("glm_moe_dsa", DCP2, draft_tokens=True),
    "KV heads, TP4": Case("qwen3", TP4_DCP2),
    "experts, EP2": Case("qwen3_moe", RankLayout(2, 2, dcp_size=2), ONE_KV_HEAD),
    "tied states, draft tokens": Case(
        "qwen3_next", DCP2, {**ONE_KV_HEAD, "tie_word_embeddings": True}, {"page_size": 2}, draft_tokens=True
    ),
    "windows of KV heads, draft tokens": Case("qwen3_windows", TP4_DCP2, draft_tokens=True),
    "sinks, ag_rs": Case("gpt_oss", DCP2, ONE_KV_HEAD, AG_RS, tokens_only=True),
    "sinks of KV heads": Case("gpt_oss", TP4_DCP2, tokens_only=True),
    "KV heads, drafts": Case("glm4_moe", TP4_DCP2, drafts="NEXTN"),
    "embedded": Case("", TP4_DCP2),
}
BY_FLASHINFER = {"decode": ("decode",), "prompts": ("prompts",), "all": ("decode", "prompts")}
CASES |= {
    f"latents, {layout}, FlashInfer, {what}{', draft_tokens' * draft_tokens}": Case(
        "deepseek_v3", LAYOUTS[layout], flags={"page_size": 2 * LAYOUTS[layout].dcp_size} if not draft_tokens else {},
        draft_tokens=draft_tokens, flashinfer=ops,
    )
    for layout in ("DCP2", "DCP4")
    for what, ops in BY_FLASHINFER.items()
    for draft_tokens in (False, True)
} | {
    "latents, DCP2, FlashInfer, drafts": Case("deepseek_v3", DCP2, drafts="NEXTN", flashinfer=BY_FLASHINFER["all"])
}  # fmt: skip
CASES |= {
    f"{name}, {layout}, {drafter}": Case(name, LAYOUTS[layout], drafts=drafter)
    for name, layouts in DRAFTED.items()
    for layout in layouts
    for drafter, (_, models) in DRAFTERS.items()
    if name in models
}


def _rank(
    rank: int, case: Case, folder: str, out: Path, known: dict[str, list[int]] | None, drafts: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    flags = case.flags | drafts
    if case.flashinfer:
        flags["attention"] = Attention(partial(_backends, case.flashinfer), GraphSizes((1, 3, 4)))
    for i, replayed in enumerate((None, set[int]())[: case.rounds]):
        result = outcome(folder, case.ranks, rank, f"file://{out}/rendezvous{i}", replayed, known, **flags)
        (out / f"{i}.{rank}.json").write_text(json.dumps(result.__dict__))
        parallel_state.shutdown()


def _backends(ops: tuple[str, ...], runner: ModelRunner) -> tuple[Any, Any]:
    """Of requests that decode, and of prompts."""
    others = DeviceLengths()
    with faked_flashinfer():
        flashinfer = backend("flashinfer", runner)
    decode, prompts = (flashinfer if op in ops else others for op in ("decode", "prompts"))
    return decode, prompts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * case.thorough) for name, case in CASES.items()]
)
def test_ranks_that_share_out_tokens_give_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    case, folder, drafts = CASES[name], str(DEFAULT_MODEL_PATH), {}
    if case.tiny:
        folder = str(tmp_path / "model")
        if case.drafts:
            build, _ = DRAFTERS[case.drafts]
            drafts = build(case.tiny, Path(folder), tmp_path / "draft") | DRAFT_TOKENS
        else:
            save_tiny(case.tiny, Path(folder), **case.changes)
    alike = {"page_size": case.ranks.dcp_size, **case.flags, "dcp_comm_backend": "a2a"}
    one = outcome(folder, ONE_RANK, 0, None, **alike)
    assert one.num_retracted > 0 and one.num_cached > 0 and one.finishes["aborted"] == "abort"
    known = one.tokens if case.draft_tokens else None
    run_ranks(_rank, (case, folder, tmp_path, known, drafts), case.ranks.world_size)
    for i in range(case.rounds):
        every = [json.loads((tmp_path / f"{i}.{rank}.json").read_text()) for rank in range(case.ranks.world_size)]
        for rank, got in enumerate(Outcome(**one_rank) for one_rank in every):
            where = f"rank {rank}, {('no graphs', 'graphs')[i]}"
            assert got == Outcome(**every[0]), where
            if not case.draft_tokens and not case.drafts and not case.tokens_only:
                assert got == one, where
            assert got.num_retracted > 0 or case.tokens_only, where
            assert got.num_cached > 0 and got.finishes == one.finishes, where
            aborted, other = got.tokens["aborted"], one.tokens["aborted"]
            assert aborted and aborted[: len(other)] == other[: len(aborted)] and len(aborted) < NEW_TOKENS, where
            assert {**got.tokens, "aborted": other} == one.tokens, where
