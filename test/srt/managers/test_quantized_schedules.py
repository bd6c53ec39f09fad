"""Ranks whose sums travel as e4m3 (--enable-quantized-all-reduce): the schedule of `test_parallel_schedules`, for every
kind of model and layout. All ranks decide and sample alike, and graphs change no token."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FEATURES, LAYOUTS, cells, kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.quantized_sums import QuantizedSums
from sglang.srt.layers import embedding
from sglang.srt.plan.ranks import RankLayout

from .test_attention_groups import pool_of, save_models
from .test_parallel_schedules import Outcome, outcome

FEATURE = "quantized all-reduce"
FLAGS = {"all": FEATURES[FEATURE].flags, "prefill": {"enable_quantized_all_reduce": "prefill"}, "off": {}}
"""The rows of prompts decide in `prefill`: ranks on CPUs have no least size."""
CELLS = [
    *cells(
        kinds(lacking="repeats, cut heads"), ("TP2", "TP4", "EP2", "DP2", "TP4 x DP2", "TP4 x DP2, own heads"), FEATURE
    ),
    *cells(kinds("plain"), ("TP2 x PP2", "DCP2"), FEATURE),
    ("TP2 x PP2", "embedded"),
]


class Calls(Counter[str]):
    """Counts what is quantized, in rows of the message."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            called = getattr(QuantizedSums, name)

            def counted(sums: Any, x: torch.Tensor, name: str = name, called: Any = called) -> torch.Tensor:
                self[name] += 1
                self["least"] = min(self.get("least", 1 << 30), x.shape[-2])
                return called(sums, x)

            monkeypatch.setattr(QuantizedSums, name, counted)


def _rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, modes: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    embedding.MIN_SHARDED_ROWS = 2
    calls, groups = Calls(), ranks.attn_dp_size
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls.watch(monkeypatch)
        for name, folder in folders.items():
            for mode in modes:
                calls.clear()
                more: dict[str, Any] = {"max_running_requests": 4 * groups, "chunked_prefill_size": 16 * groups}
                more |= FLAGS[mode.partition(",")[0]]
                if groups > 1:
                    more["max_total_tokens"] = pool_of(name)
                replayed = set[int]() if "graphs" in mode else None
                result = outcome(folder, ranks, rank, f"file://{out}/rendezvous.{name}.{mode}", replayed, **more)
                (out / f"{name}.{mode}.{rank}.json").write_text(json.dumps([result.__dict__, calls]))
                parallel_state.shutdown()


def run(ranks: RankLayout, names: tuple[str, ...], modes: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """(name, mode) -> outcome and calls of rank 0, which all ranks have alike; stages differ in their calls."""
    folders = save_models(names, ranks, folder)
    run_ranks(_rank, (ranks, folders, folder, modes), ranks.world_size)
    results = {}
    for name in names:
        for mode in modes:
            files = [folder / f"{name}.{mode}.{rank}.json" for rank in range(ranks.world_size)]
            every = [json.loads(file.read_text()) for file in files]
            logprobs = every[ranks.leader][0]["logprobs"]
            for rank, (got, _) in enumerate(every):
                assert got["logprobs"] == (logprobs if rank == ranks.leader else []), f"{name}, {mode}, rank {rank}"
                got["logprobs"] = logprobs
                assert got == every[0][0], f"{name}, {mode}, rank {rank}"
            results[name, mode] = Outcome(**every[0][0]), every[0][1]
    return results


def check(ranks: RankLayout, names: tuple[str, ...], folder: Path) -> None:
    results = run(ranks, names, ("all", "all, graphs", "prefill", "off"), folder)
    gathers = ranks.attn_dp_size > 1
    for name in names:
        (eager, calls), (graphs, _) = results[name, "all"], results[name, "all, graphs"]
        (prompts, few), (exact, none) = results[name, "prefill"], results[name, "off"]
        assert graphs.tokens == eager.tokens, f"{name}: a row does not depend on the others"
        assert calls["all_reduce" if ranks.attn_tp_size > 1 else "reduce_scatter"] > 0, name
        assert not gathers or calls["all_gather"] > 0, name
        assert calls["least"] == 1, f"{name}: steps that decode"
        assert few["least"] > 4, f"{name}: steps with more rows than four requests"
        assert sum(few.values()) < sum(calls.values()) and not none, name
        assert eager.finishes == prompts.finishes == exact.finishes, name
        assert eager.tokens["plain"] == eager.tokens["same prompt"], name


def test_ranks_with_quantized_sums_agree(tmp_path: Path) -> None:
    check(LAYOUTS["TP2"], ("dense",), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_ranks_of_every_layout_agree(layout: str, name: str, tmp_path: Path) -> None:
    check(LAYOUTS[layout], (name,), tmp_path)
