"""Ranks that share out the tokens of their caches (--dcp-size) take the decisions of one process with pages of the same
size, and give its tokens: the schedule of `test_parallel_schedules`, for every kind of model, with and without graphs
and draft tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import KINDS, LAYOUTS, cells, kinds, save_kind
from pairs import some
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.graph_runner import GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.model_executor.backend_matrix import backend, faked_flashinfer
from srt.model_executor.graph_stand_ins import DeviceLengths
from srt.speculative.test_draft_matrix import PAIRS, build

from .test_parallel_schedules import NEW_TOKENS, Attention, Outcome, outcome

DCP = ("DCP2", "DCP4", "TP4 x DCP2")
AG_RS = {"dcp_comm_backend": "ag_rs"}
DRAFTED = {"latents": DCP, "shared selection": ("DCP2",), "dense": ("TP4 x DCP2",)}
"""Layouts of kinds with each drafter."""
DRAFT_TOKENS = {"speculative_num_draft_tokens": 3}


@dataclass(frozen=True)
class Case:
    """A kind of model, its layout, and flags."""

    kind: str
    layout: str
    flags: dict[str, Any] = field(default_factory=dict)
    draft_tokens: bool = False
    drafts: str = ""
    """Drafter of the ranks, of `DRAFTERS` in `test_draft_matrix`; one process does not draft."""
    flashinfer: tuple[str, ...] = ()
    """What its attention to latents computes on the ranks, of "decode" and "prompts"; plain torch the rest."""

    def __str__(self) -> str:
        words = [self.kind, self.layout, *self.flags, self.drafts, *(f"FlashInfer {op}" for op in self.flashinfer)]
        return ", ".join(filter(None, [*words, "draft tokens" * self.draft_tokens]))

    @property
    def ranks(self) -> RankLayout:
        return LAYOUTS[self.layout]

    @property
    def page(self) -> int:
        """Tokens of a page in one process, in which ranks have an equal share of each."""
        return math.lcm(KINDS[self.kind].page, self.ranks.dcp_size)

    @property
    def tokens_only(self) -> bool:
        """Whether decisions are other ones than those of one process, and perhaps no request goes back to the queue:
        steps take turns in stages, and windows have another share of a memory where tokens take less."""
        limited = KINDS[self.kind].attention in ("windows", "chunks", "sinks")
        return self.ranks.pp_size > 1 or (limited and (self.kind, self.layout) not in SAME_DECISIONS)

    @property
    def rounds(self) -> int:
        """Without graphs, and with them: there are none of drafts whose attention is planned on the host."""
        return 1 if self.flashinfer and self.drafts else 2


SAME_DECISIONS = (("windows, KV head", "DCP2"), ("windows, KV head", "TP4 x DCP2"))
"""With four ranks that share tokens there are 56 window tokens and not 80."""
BOTH = ("decode", "prompts")
CASES = [
    *(Case(*cell[::-1], draft_tokens=drafts) for cell in cells(kinds(), DCP) for drafts in (False, True)),
    Case("latents", "TP4 x DCP2", AG_RS),
    Case("latents", "EP2 x DCP2"),
    Case("latents", "DCP3", {"chunked_prefill_size": 15}),
    Case("latents", "DCP2 x PP2"),
    Case("latents", "DCP2", {"page_size": 4}),
    Case("selected latents", "DCP2", AG_RS),
    Case("experts, KV head", "EP2 x DCP2"),
    Case("sinks, KV head", "DCP2", AG_RS),
    *(
        Case("latents", layout, {} if drafts else {"page_size": 2 * LAYOUTS[layout].dcp_size}, drafts, flashinfer=ops)
        for layout in ("DCP2", "DCP4")
        for ops in (*((op,) for op in BOTH), BOTH)
        for drafts in (False, True)
    ),
    Case("latents", "DCP2", drafts="NEXTN", flashinfer=BOTH),
    *(Case(kind, layout, drafts=drafter) for drafter, kind in PAIRS for layout in DRAFTED.get(kind, ())),
]
QUICK = [Case(kind, "DCP2", draft_tokens=True) for kind in ("latents", "KV head")]


def _rank(
    rank: int, case: Case, folder: str, out: Path, known: dict[str, list[int]] | None, drafts: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    own_pages = {"page_size": case.page} if "states" in KINDS[case.kind].tags else {}  # they would be longer
    flags = own_pages | case.flags | drafts
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


@pytest.mark.parametrize("case", some(CASES, QUICK), ids=str)
def test_ranks_that_share_out_tokens_give_the_tokens_of_one_process(case: Case, tmp_path: Path) -> None:
    drafts: dict[str, Any] = {}
    if case.drafts:
        target, options = build(case.drafts, case.kind, tmp_path)
        drafts = {key: value for key, value in options.items() if key != "page_size"} | DRAFT_TOKENS
    else:
        target = save_kind(case.kind, tmp_path / "model", case.ranks)
    folder = str(target)
    alike = {"page_size": case.page, **case.flags, "dcp_comm_backend": "a2a"}
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
