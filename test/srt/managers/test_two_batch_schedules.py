"""Ranks whose steps with prompts run as two microbatches (--enable-two-batch-overlap): the schedule of
`test_parallel_schedules`, for every kind of model and layout, gives the tokens that it gives without, also beside sums
in eight bits, steps in graphs and draft tokens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FEATURES, KINDS, LAYOUTS, cells, kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.ping_pong import PingPong
from sglang.srt.layers import embedding
from sglang.srt.model_executor import two_batch_overlap
from sglang.srt.model_executor.two_batch_overlap import TwoBatchOverlap
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.two_batch_overlap import alternates_by_block

from .test_attention_groups import save_models
from .test_parallel_schedules import POOL, Outcome, outcome

FEATURE = "two-batch overlap"
ON: dict[str, Any] = dict(FEATURES[FEATURE].flags)
EIGHT_BITS: dict[str, Any] = dict(FEATURES["quantized all-reduce"].flags)
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "microbatches": ON,
    "microbatches beside graphs": ON,
    "draft tokens, whole": {},
    "draft tokens, microbatches": ON,
    "eight bits, whole": EIGHT_BITS,
    "eight bits, microbatches": ON | EIGHT_BITS,
}
CHUNK = 56
"""Of several prompts, some of which end near its middle."""
CELLS = [
    *cells(kinds(lacking="repeats, cut heads"), ("TP2", "TP4", "EP2", "DP2", "TP4 x DP2"), FEATURE),
    *cells(kinds("plain"), ("TP2 x PP2", "DP2 x PP2", "TP4 x DP2, own heads"), FEATURE),
    ("TP2 x PP2", "embedded"),
]


class CountedSteps(Counter[str]):
    """Counts steps that ran as two microbatches, those of them that decode as well, that cut a prompt, that alternated
    block by block, what travelled, and what was waited for in the middle of a block."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compute, start, run_collective = TwoBatchOverlap.compute, PingPong.start_collective, PingPong.run_collective

        def counted_compute(overlap: Any, batch: Any, both: Any, loads: Any) -> Any:
            first, second = both
            inside = bool(first.slots[-1] == second.slots[0])
            self.update(steps=1, mixed=first.num_decodes > 0, inside=inside, between=not inside)
            model = overlap.state.model
            assert model.defers_all_reduce == alternates_by_block(model.description, overlap.groups.dp.size)
            self["by block"] += model.defers_all_reduce
            return compute(overlap, batch, both, loads)

        def counted_start(ping_pong: Any, what: Any, collective: Any) -> Any:
            self["travelled"] += 1
            return start(ping_pong, what, collective)

        def counted_run(ping_pong: Any, what: Any, collective: Any) -> Any:
            self["waited for"] += ping_pong.by_block
            return run_collective(ping_pong, what, collective)

        monkeypatch.setattr(TwoBatchOverlap, "compute", counted_compute)
        monkeypatch.setattr(PingPong, "start_collective", counted_start)
        monkeypatch.setattr(PingPong, "run_collective", counted_run)


def _rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, modes: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    embedding.MIN_SHARDED_ROWS = 2
    counts = CountedSteps()
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts.watch(monkeypatch)
        monkeypatch.setattr(two_batch_overlap, "OFF_MIDDLE", 3)  # so that some of these short prompts stay whole
        for name, folder in folders.items():
            known: dict[str, list[int]] | None = None
            for mode in modes:
                more = {
                    "max_total_tokens": POOL if KINDS[name].attention != "compressed" else 2 * POOL,
                    "chunked_prefill_size": CHUNK * ranks.attn_dp_size,
                    "max_running_requests": 4 * ranks.attn_dp_size,
                    **MODES[mode],
                }
                counts.clear()
                replayed = set[int]() if "graphs" in mode else None
                draft_tokens = known if "draft tokens" in mode else None
                result = outcome(folder, ranks, rank, f"file://{out}/{name}.{mode}", replayed, draft_tokens, **more)
                known = known or result.tokens
                (out / f"{name}.{mode}.{rank}.json").write_text(json.dumps([result.__dict__, counts]))
                parallel_state.shutdown()


def check(ranks: RankLayout, names: tuple[str, ...], modes: tuple[str, ...], folder: Path) -> None:
    folders = save_models(names, ranks, folder)
    run_ranks(_rank, (ranks, folders, folder, modes), ranks.world_size)
    for name in names:
        results: dict[str, tuple[Outcome, Counter[str]]] = {}
        for mode in modes:
            files = [folder / f"{name}.{mode}.{rank}.json" for rank in range(ranks.world_size)]
            every = [json.loads(file.read_text()) for file in files]
            logprobs = next((got["logprobs"] for got, _ in every if got["logprobs"]), [])
            for rank, (got, _) in enumerate(every):
                assert got["logprobs"] == (logprobs if rank == ranks.leader else []), f"{name}, {mode}, rank {rank}"
                got["logprobs"] = logprobs
                assert got == every[0][0], f"{name}, {mode}, rank {rank}"
            results[mode] = Outcome(**every[0][0]), sum((Counter(counts) for _, counts in every), Counter())
        for mode, (got, counts) in results.items():
            where = f"{name}, {mode}"
            if "microbatches" not in mode:
                assert not counts, where
                continue
            seldom = ranks.attn_dp_size > 1 and ranks.pp_size > 1  # steps take turns, and those that verify are whole
            least = ranks.world_size * (1 if seldom else 2)
            assert counts["steps"] >= least and (counts["inside"] or seldom), where
            assert (counts["mixed"] and (counts["between"] or name != "dense")) or ranks.attn_dp_size > 1, where
            assert counts["travelled"] >= 4 * counts["steps"], where
            by_block = ranks.attn_dp_size == 1 and "own sums" not in KINDS[name].tags
            assert counts["by block"] == by_block * counts["steps"], where
            assert counts["waited for"] <= 2 * counts["by block"], f"{where}: not only the embedding's sum"
            assert got == results[mode.partition("microbatches")[0] + "whole"][0], where


def test_microbatches_give_the_tokens_of_whole_steps(tmp_path: Path) -> None:
    check(LAYOUTS["TP2"], ("dense", "gated delta, tied"), ("whole", "microbatches beside graphs"), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_microbatches_of_every_layout(layout: str, name: str, tmp_path: Path) -> None:
    check(LAYOUTS[layout], (name,), tuple(MODES), tmp_path)
