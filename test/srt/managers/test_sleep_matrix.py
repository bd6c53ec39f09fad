"""Sleep of both levels with every kind of model and what else a server has: tokens are those of before.

`make test` runs recurrent states, latents, sinks, compressed entries, each feature with one kind, and two layouts of
ranks; the rest is `thorough`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from matrix import FEATURES, KINDS, LAYOUTS, cells, flags_of, kinds, save_kind
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state

from .test_memory_control import NEW_TOKENS, Rank, prompt

BARE = ""
QUICK = [(BARE, kind) for kind in ("gated delta", "latents", "sinks", "compressed, 3 layers")]
CASES = [(BARE, kind) for kind in kinds(lacking="")]
for feature in ("fp8", "fp4", "host cache", "experts in main memory"):
    of_feature = [(feature, kind) for _, kind in cells(kinds(), feature=feature)]
    QUICK += of_feature[:1]
    CASES += of_feature


@pytest.mark.parametrize(("feature", "kind"), some_of(CASES, QUICK))
def test_tokens_are_those_of_before(feature: str, kind: str, tmp_path: Path) -> None:
    flags = dict(FEATURES[feature].flags) if feature else {}
    folder = save_kind(kind, tmp_path / "model")
    rank = Rank(folder, **{"page_size": KINDS[kind].page, **flags})
    asleep_and_awake(rank)


def asleep_and_awake(rank: Rank) -> None:
    """Puts a rank to sleep and wakes it, by both levels. Its tokens stay."""
    expected = [rank.tokens(prompt(seed)) for seed in range(2)]
    assert all(len(ids) == NEW_TOKENS for ids in expected)
    for level in (1, 2):
        problem = rank.memory.sleep([], keep_weights=level == 1)
        if rank.runner.plan.expert_slots is not None and level == 2:
            assert "keep them in main memory" in problem
            return
        assert not problem
        assert not rank.memory.wake([], "key")
        assert rank.memory.state.serves, rank.memory.state.problem
        assert [rank.tokens(prompt(seed)) for seed in range(2)] == expected, level


RANK_CELLS = [
    *cells(("experts",), ("EP2",)),
    *cells(("latents",), ("DCP2 x PP2", "TP4 x DCP2", "EP2 x DCP2")),
    *cells(("selected latents",), ("TP4 x DCP2",)),
]
QUICK_CELLS = [("EP2", "experts"), ("DCP2 x PP2", "latents")]


def _rank(number: int, layout: str, kind: str, folder: Path) -> None:
    """Every rank sleeps and wakes in the same order, as the processes of a server do; the leader has the tokens."""
    torch.set_num_threads(1)
    page = math.lcm(KINDS[kind].page, LAYOUTS[layout].dcp_size)
    rank = Rank(folder, number, f"file://{folder}/rendezvous", page_size=page, **flags_of(layout))
    asleep_and_awake(rank)
    parallel_state.shutdown()


@pytest.mark.parametrize(("layout", "kind"), some_of(RANK_CELLS, QUICK_CELLS))
def test_ranks_sleep_together(layout: str, kind: str, tmp_path: Path) -> None:
    save_kind(kind, tmp_path, LAYOUTS[layout])
    run_ranks(_rank, (layout, kind, tmp_path), LAYOUTS[layout].world_size)
