"""Random schedules with four-bit keys and values: every request gets the tokens that it gets alone, whatever chunks its
prompt comes in, which prefix it finds, who is sent back to the queue, and which proposes stand. Main memory with them
is in `test_host_matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FEATURES, LAYOUTS, cells, kinds, smallest_kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import native_ops
from sglang.srt.layers.native_fp4 import quantize_fp4_rows
from sglang.srt.plan.ranks import RankLayout
from srt.managers.test_random_schedules import DRAFT_TOKENS, FEW_PROMPTS, PAGES, Schedule, World, short_pauses

FP4 = dict(FEATURES["fp4"].flags)
NAMES = [name for _, name in cells(kinds(lacking="cut heads, embedded"), feature="fp4")]


def quantize_rounded(x: torch.Tensor, tensor_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As the CPU does it, of keys and values in bf16, as servers on GPUs have them. In float32 what chunks of other
    lengths change is the last bit, and that may decide between two codes."""
    return quantize_fp4_rows(x.to(torch.bfloat16).float(), tensor_scale)


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "quantize_fp4_rows", quantize_rounded)


def play(world: World, draft_tokens: str, page: int, count: int) -> None:
    world.prepare()
    with short_pauses():
        for seed in range(count):
            Schedule(world, draft_tokens, page, seed).run()


@pytest.mark.parametrize(
    ("name", "draft_tokens", "page"), [("dense", "half-right", 1), ("sinks", "none", 4), ("gated delta", "right", 16)]
)
def test_random_schedules(name: str, draft_tokens: str, page: int, tmp_path: Path) -> None:
    world = World(name, tmp_path, options=FP4, num_prompts=FEW_PROMPTS)
    play(world, draft_tokens, page, 1)
    _, runner = world.runner(page, draft_tokens)
    (kinds,) = {tuple(sorted(store.group_scales())) for store in runner.model.caches if store.name == "kv"}
    assert kinds == ("k_group_scales", "v_group_scales")


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("draft_tokens", DRAFT_TOKENS)
@pytest.mark.parametrize("name", NAMES)
def test_many_random_schedules(name: str, draft_tokens: str, page: int, tmp_path: Path) -> None:
    play(World(name, tmp_path, options=FP4), draft_tokens, page, 8)


def _rank(
    rank: int,
    name: str,
    folder: Path,
    known: dict[str, Any],
    ranks: RankLayout,
    draft_tokens: str,
    page: int,
    count: int,
) -> None:
    with short_pauses(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_ops, "quantize_fp4_rows", quantize_rounded)
        world = World(name, folder, ranks, rank, FP4, **known)
        for seed in range(count):
            Schedule(world, draft_tokens, page, seed).run()
        parallel_state.shutdown()


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("draft_tokens", ["none", "half-right"])
@pytest.mark.parametrize(("layout", "name"), cells(smallest_kinds(), ("TP2", "PP2", "TP2 x PP2"), "fp4"))
def test_several_ranks(layout: str, name: str, draft_tokens: str, tmp_path: Path) -> None:
    with short_pauses():
        known = World(name, tmp_path, options=FP4).known()
    run_ranks(_rank, (name, tmp_path, known, LAYOUTS[layout], draft_tokens, 4, 6), LAYOUTS[layout].world_size)
