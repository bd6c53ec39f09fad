"""Every kind of cache with every policy of copies to main memory, with draft tokens and without, on one rank and on
several: 13,000 random turns under pools so small that every prefix is evicted, with copies that are late, fail, or end
in another order than they were begun. Every turn gets the tokens of a server without a cache, and after each schedule
the pools of every tier are exact.

    pytest -m schedules -s test/srt/managers/test_host_matrix.py
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import native_ops
from sglang.srt.layers.native_fp4 import quantize_fp4_rows
from sglang.srt.mem_cache import host_tier
from sglang.srt.plan.host_cache import COPIED
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.managers.test_host_tier import (
    DCP_SHARDED,
    OPTIONS,
    SHARED,
    HostSchedule,
    HostWorld,
    loads_by_layers_sometimes,
)
from srt.managers.test_random_schedules import DRAFT_TOKENS, FEW_PROMPTS, PAGES, World, short_pauses
from srt.models.harness import save_tiny

TURNS = 13_000
PLACES = 4
"""Chunks of other lengths change the last bit of keys and values, and where that decides between two four-bit codes a
request may get other tokens, with a tier or without. So a schedule of theirs that differs is played again with
all boundaries between codes in another place: what is wrong for another reason stays wrong."""


@dataclass(frozen=True)
class Kind:
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    pages: tuple[int, ...] = PAGES
    on_ranks: bool = True
    """Also on several ranks."""
    drafts: bool = False
    """It drafts for itself, with caches of the draft's own."""
    shares_out: bool = False
    """Also on ranks that share out its tokens."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of config.json."""

    def fits(self, layout: str) -> bool:
        ranks = LAYOUTS[layout]
        if ranks.dcp_size > 1:
            return self.shares_out
        return self.on_ranks or (ranks == ONE_RANK and not self.changes)

    def pages_on(self, layout: str) -> tuple[int, ...]:
        return tuple(page for page in self.pages if page % LAYOUTS[layout].dcp_size == 0)

    @property
    def places(self) -> int:
        return PLACES if self.options == FP4 else 1

    @property
    def draft_tokens(self) -> tuple[str, ...]:
        return ("none",) if self.drafts else tuple(DRAFT_TOKENS)


FP8, FP4 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp4_e2m1"}
ONE_KV_HEAD: dict[str, Any] = {"on_ranks": False, "shares_out": True, "changes": {"num_key_value_heads": 1}}
KINDS = {
    "dense": Kind("qwen3"),
    "dense in fp8": Kind("qwen3", FP8),
    "dense in fp4": Kind("qwen3", FP4),
    "dense, draft": Kind("qwen3", drafts=True),
    "windows": Kind("mistral_windows"),
    "windows in fp4": Kind("mistral_windows", FP4),
    "windows, draft": Kind("mistral_windows", drafts=True, on_ranks=False),
    "windows and sinks": Kind("gpt_oss", on_ranks=False),
    "chunks": Kind("llama4", on_ranks=False),
    "convolutions": Kind("inkling", on_ranks=False),
    "latents": Kind("deepseek_v3", shares_out=True),
    "sparse latents": Kind("deepseek_v32", shares_out=True),
    "gated delta": Kind("qwen3_5"),
    "gated delta in fp4": Kind("qwen3_5", FP4, on_ranks=False),
    "Mamba-2": Kind("nemotron_h"),
    "compressed entries": Kind("deepseek_v4_small", pages=(8, 16), on_ranks=False),
    "KV head": Kind("qwen3", **ONE_KV_HEAD),
    "KV head in fp8": Kind("qwen3", FP8, **ONE_KV_HEAD),
    "KV head, draft": Kind("qwen3", drafts=True, **ONE_KV_HEAD),
    "KV head, windows": Kind("qwen3_windows", **ONE_KV_HEAD),
    "KV head, gated delta": Kind("qwen3_5", **ONE_KV_HEAD),
}
LAYOUTS = {"one rank": ONE_RANK, **SHARED, **DCP_SHARDED}


@dataclass(frozen=True)
class Cell:
    kind: str
    layout: str
    draft_tokens: str
    page: int
    policy: str

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self).encode())


def cells() -> list[Cell]:
    crossed = []
    for layout in LAYOUTS:
        for name, kind in KINDS.items():
            if not kind.fits(layout):
                continue
            draft_tokens = kind.draft_tokens if layout == "one rank" else kind.draft_tokens[:: len(DRAFT_TOKENS) - 1]
            for number, draft_token in enumerate(draft_tokens):
                for policy in COPIED:
                    pages = kind.pages_on(layout)
                    page = pages[(len(crossed) + number) % len(pages)]
                    crossed.append(Cell(name, layout, draft_token, page, policy))
    return crossed


CELLS = cells()
OF_CELL = -(-TURNS // len(CELLS))


class Rounding:
    factor = 1.0

    @classmethod
    def quantize(cls, x: torch.Tensor, tensor_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp4_rows((x * cls.factor).to(torch.bfloat16).float(), tensor_scale)


@dataclass
class MatrixWorld(HostWorld):
    plain: World | None = None
    """Whose tokens are the right ones, in place of this one's without a cache."""

    places: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)
    """`outputs` by the place of the boundaries between codes."""

    def use_place(self, place: int) -> None:
        Rounding.factor = 1 + place / 64
        self.outputs = self.places.setdefault(place, {})

    def alone(self, ids: list[int], output: int = 40) -> list[int]:
        return super().alone(ids, output) if self.plain is None else self.plain.alone(ids, output)


def world_of(name: str, folder: Path, ranks: RankLayout = ONE_RANK, rank: int = 0) -> MatrixWorld:
    kind = KINDS[name]
    options, whole = {**OPTIONS, **kind.options}, min(kind.pages)
    plain = None
    if kind.drafts:
        plain = World(kind.model, folder, options=dict(kind.options), whole=whole)
        options |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
        options["speculative_num_steps"] = 3
    return MatrixWorld(kind.model, folder, ranks, rank, options, whole, plain=plain)


def play(world: MatrixWorld, cell: Cell, turns: int) -> Counter[str]:
    """Schedules until there were so many turns."""
    seen: Counter[str] = Counter()
    seed = cell.seed
    with loads_by_layers_sometimes():
        while seen["turns"] < turns:
            for place in range(KINDS[cell.kind].places):
                world.use_place(place)
                schedule = HostSchedule(world, cell.draft_tokens, cell.page, seed)
                assert schedule.scheduler.host_tier is not None
                schedule.scheduler.host_tier.use_policy(cell.policy)
                schedule.play()
                wrong = schedule.wrong()
                schedule.check()
                seen += schedule.seen
                if not wrong:
                    break
                seen["played again"] += 1
            assert not wrong, (cell, seed, wrong)
            seen.update({"schedules": 1, "turns": len(schedule.wanted)})
            seed += 1
    return seen


@contextmanager
def short_prefixes() -> Iterator[None]:
    """Few tokens are worth a load."""
    with ExitStack() as stack:
        stack.enter_context(short_pauses())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(host_tier, "MIN_GAIN", 1)
        patch.setattr(native_ops, "quantize_fp4_rows", Rounding.quantize)
        yield


def play_all(name: str, layout: str, folder: Path, turns: int, rank: int = 0) -> Counter[str]:
    """All cells of a kind on this rank; one group of ranks after the other, since there can be one at a time."""
    ranks, seen = LAYOUTS[layout], Counter[str]()
    mine = [cell for cell in CELLS if (cell.kind, cell.layout) == (name, layout)]
    with short_prefixes():
        world = world_of(name, folder, ranks, rank)
        world.use_place(0)
        world.grow_tree()
        for place in reversed(range(KINDS[name].places if ranks.world_size > 1 else 1)):  # before the ranks meet
            world.use_place(place)
            for ids in world.prompts:
                world.alone(ids)
        for draft_tokens, page in dict.fromkeys((cell.draft_tokens, cell.page) for cell in mine):
            for cell in mine:
                if (cell.draft_tokens, cell.page) == (draft_tokens, page):
                    of_cell = play(world, cell, turns)
                    assert of_cell["saved"], (cell, of_cell)
                    seen += of_cell
            if ranks.world_size > 1:
                parallel_state.shutdown()
    assert seen["failed"], seen
    return seen


def _rank(rank: int, name: str, layout: str, folder: Path, turns: int) -> None:
    seen = play_all(name, layout, folder, turns, rank)
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


def seen_by(name: str, layout: str, folder: Path, turns: int) -> Counter[str]:
    save_tiny(KINDS[name].model, folder, **KINDS[name].changes)
    if layout == "one rank":
        return play_all(name, layout, folder, turns)
    run_ranks(_rank, (name, layout, folder, turns), LAYOUTS[layout].world_size)
    return Counter(json.loads((folder / "seen.json").read_text()))


def test_the_matrix_crosses_everything() -> None:
    """Every kind meets every policy with and without draft tokens; those on several ranks in every layout."""
    for name, kind in KINDS.items():
        for layout in filter(kind.fits, LAYOUTS):
            met = {(c.policy, c.draft_tokens != "none") for c in CELLS if (c.kind, c.layout) == (name, layout)}
            assert met == {
                (policy, drafts) for policy in COPIED for drafts in ((False,) if kind.drafts else (False, True))
            }
    assert OF_CELL * len(CELLS) >= TURNS and {cell.layout for cell in CELLS} == LAYOUTS.keys()
    pages = {name: {c.page for c in CELLS if c.kind == name} for name in KINDS}
    assert all(len(of_kind) > 1 for of_kind in pages.values()), pages


IN_CI = [[c for c in CELLS if (c.layout, c.kind) == ("one rank", kind)][-1] for kind in ("latents", "dense in fp4")]


@pytest.mark.parametrize("cell", IN_CI, ids=lambda cell: cell.kind)
def test_a_cell(cell: Cell, tmp_path: Path) -> None:
    """Of the thousands of turns below a few, with draft tokens and copies at eviction. Scales of codes travel, too."""
    save_tiny(KINDS[cell.kind].model, tmp_path, **KINDS[cell.kind].changes)
    with short_prefixes():
        world = world_of(cell.kind, tmp_path)
        world.num_prompts = FEW_PROMPTS
        world.use_place(0)
        world.grow_tree()
        seen = play(world, cell, 25)
    assert cell.policy == "write_back" and seen["saved"] and seen["loaded"], seen


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("layout", "name"), dict.fromkeys((cell.layout, cell.kind) for cell in CELLS))
def test_thousands_of_turns(layout: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = seen_by(name, layout, tmp_path, OF_CELL)
    with capsys.disabled():
        print(f"\n{layout}, {name}: {dict(sorted(seen.items()))}", flush=True)
    assert seen["aborted"] and seen["loaded"] and seen["played again"] <= seen["schedules"] / 4, seen
