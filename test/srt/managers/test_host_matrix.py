"""Every kind of cache with every policy of copies to main memory, with draft tokens and without, on one rank and on
several: thousands of random turns under pools so small that every prefix is evicted, with copies that are late, fail,
or end in another order than they were begun. Every turn gets the tokens of a server without a cache, and after each
schedule the pools of every tier are exact.

    pytest -m schedules -s test/srt/managers/test_host_matrix.py
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FEATURES, KINDS, LAYOUTS, cells, kinds, save_kind, smallest_kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import native_latent_records, native_ops
from sglang.srt.layers.native_fp4 import quantize_fp4_rows
from sglang.srt.layers.native_latent_records import pack_records
from sglang.srt.mem_cache import host_tier
from sglang.srt.plan.host_cache import COPIED
from sglang.srt.plan.latent_record import LatentRecord
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.managers.test_host_tier import OPTIONS, HostSchedule, HostWorld, loads_by_layers_sometimes
from srt.managers.test_random_schedules import DRAFT_TOKENS, FEW_PROMPTS, PAGES, World, short_pauses

TURNS = 13_000
PLACES = 4
"""Chunks of other lengths change the last bit of keys and values, and where that decides between two four-bit codes a
request may get other tokens, with a tier or without. So a schedule of theirs that differs is played again with
all boundaries between codes in another place: what is wrong for another reason stays wrong."""


@dataclass(frozen=True)
class Form:
    """A kind of model with a type of its keys and values, and whether it drafts for itself: then it has caches of the
    draft's own."""

    kind: str
    dtype: str | None = None
    drafts: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{f' in {self.dtype}' if self.dtype else ''}{', draft' * self.drafts}"

    @property
    def options(self) -> dict[str, Any]:
        return dict(FEATURES[self.dtype].flags) if self.dtype else {}

    def pages_on(self, layout: str) -> tuple[int, ...]:
        whole = math.lcm(KINDS[self.kind].page, LAYOUTS[layout].dcp_size)
        return tuple(page for page in ALL_PAGES if page % whole == 0)

    @property
    def places(self) -> int:
        return PLACES if self.dtype == "fp4" else 1

    @property
    def draft_tokens(self) -> tuple[str, ...]:
        return ("none",) if self.drafts else tuple(DRAFT_TOKENS)


DTYPES = (None, "fp8", "fp4")
DRAFTING = ("dense", "windows alone", "KV head")
ALL_PAGES = tuple(sorted({*PAGES, 8}))
TRIED = ("one rank", "TP2", "PP2", "TP2 x PP2", "DCP2", "DCP2 x PP2")


def forms_in(layout: str) -> list[Form]:
    """With one rank and with shared heads the smallest kind of each cache, with divided tokens those that ranks hold
    alike; each with every type that it can have."""
    names = kinds("one KV head", lacking="") if LAYOUTS[layout].dcp_size > 1 else smallest_kinds()
    forms = [Form(name, dtype) for dtype in DTYPES for _, name in cells(names, [layout], dtype)]
    return forms + [Form(name, drafts=True) for _, name in cells(DRAFTING, [layout]) if name in names]


@dataclass(frozen=True)
class Cell:
    form: Form
    layout: str
    draft_tokens: str
    page: int
    policy: str

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self).encode())


def crossed() -> list[Cell]:
    """Every form meets every policy with draft tokens and without; on several ranks those of another type than the
    model's meet one policy each, in turn."""
    found: list[Cell] = []
    policies, turns = tuple(COPIED), itertools.count()
    for layout in TRIED:
        alone = layout == "one rank"
        for turn, form in enumerate(forms_in(layout)):
            pages = form.pages_on(layout)
            for draft_tokens in form.draft_tokens if alone else form.draft_tokens[:: len(DRAFT_TOKENS) - 1]:
                page = pages[next(turns) % len(pages)]
                for policy in policies if alone or not form.dtype else policies[turn % len(policies) :][:1]:
                    found.append(Cell(form, layout, draft_tokens, page, policy))
    return found


CELLS = crossed()
OF_CELL = -(-TURNS // len(CELLS))


class Rounding:
    factor = 1.0

    @classmethod
    def quantize(cls, x: torch.Tensor, tensor_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp4_rows((x * cls.factor).to(torch.bfloat16).float(), tensor_scale)

    @classmethod
    def pack(cls, entries: torch.Tensor, record: LatentRecord, scale: float = 1.0) -> torch.Tensor:
        return pack_records((entries * cls.factor).to(torch.bfloat16).float(), record, scale)


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


def world_of(form: Form, folder: Path, ranks: RankLayout = ONE_RANK, rank: int = 0) -> MatrixWorld:
    options = {**OPTIONS, **form.options}
    plain = None
    if form.drafts:
        plain = World(form.kind, folder, options=form.options)
        options |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
        options["speculative_num_steps"] = 3
    return MatrixWorld(form.kind, folder, ranks, rank, options, plain=plain)


def play(world: MatrixWorld, cell: Cell, turns: int) -> Counter[str]:
    """Schedules until there were so many turns."""
    seen: Counter[str] = Counter()
    seed = cell.seed
    with loads_by_layers_sometimes():
        while seen["turns"] < turns:
            for place in range(cell.form.places):
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
        patch.setattr(native_latent_records, "pack_records", Rounding.pack)
        yield


def play_all(form: Form, layout: str, folder: Path, turns: int, rank: int = 0) -> Counter[str]:
    """All cells of a form on this rank; one group of ranks after the other, since there can be one at a time."""
    ranks, seen = LAYOUTS[layout], Counter[str]()
    mine = [cell for cell in CELLS if (cell.form, cell.layout) == (form, layout)]
    with short_prefixes():
        world = world_of(form, folder, ranks, rank)
        world.use_place(0)
        world.grow_tree()
        for place in reversed(range(form.places if ranks.world_size > 1 else 1)):  # before the ranks meet
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


def _rank(rank: int, form: Form, layout: str, folder: Path, turns: int) -> None:
    seen = play_all(form, layout, folder, turns, rank)
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))


def seen_by(form: Form, layout: str, folder: Path, turns: int) -> Counter[str]:
    save_kind(form.kind, folder)
    if layout == "one rank":
        return play_all(form, layout, folder, turns)
    run_ranks(_rank, (form, layout, folder, turns), LAYOUTS[layout].world_size)
    return Counter(json.loads((folder / "seen.json").read_text()))


def test_the_matrix_crosses_everything() -> None:
    """Every form of the model's type meets every policy with and without draft tokens, in every layout."""
    for layout in TRIED:
        for form in forms_in(layout):
            met = {(c.policy, c.draft_tokens != "none") for c in CELLS if (c.form, c.layout) == (form, layout)}
            policies = COPIED if layout == "one rank" or not form.dtype else {policy for policy, _ in met}
            assert policies and met == {
                (policy, drafts) for policy in policies for drafts in ((False,) if form.drafts else (False, True))
            }
    assert OF_CELL * len(CELLS) >= TURNS and {cell.layout for cell in CELLS} == set(TRIED)
    for kind in {cell.form.kind for cell in CELLS}:
        pages = {cell.page for cell in CELLS if cell.form.kind == kind}
        assert len(pages) > 1, kind


IN_CI = [
    [cell for cell in CELLS if (cell.layout, cell.form) == ("one rank", form)][-1]
    for form in (
        *(Form("latents"), Form("latents", "fp4"), Form("dense", "fp4")),
        Form("compressed, 3 layers", "fp4"),
    )
]


@pytest.mark.parametrize("cell", IN_CI, ids=lambda cell: str(cell.form))
def test_a_cell(cell: Cell, tmp_path: Path) -> None:
    """Of the thousands of turns below a few, with draft tokens and copies at eviction. Scales of codes travel, too."""
    save_kind(cell.form.kind, tmp_path)
    with short_prefixes():
        world = world_of(cell.form, tmp_path)
        world.num_prompts = FEW_PROMPTS
        world.use_place(0)
        world.grow_tree()
        seen = play(world, cell, 25)
    assert cell.policy == "write_back" and seen["saved"] and seen["loaded"], seen


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("layout", "form"), [(layout, form) for layout in TRIED for form in forms_in(layout)], ids=str)
def test_thousands_of_turns(layout: str, form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = seen_by(form, layout, tmp_path, OF_CELL)
    with capsys.disabled():
        print(f"\n{layout}, {form}: {dict(sorted(seen.items()))}", flush=True)
    assert seen["aborted"] and seen["loaded"] and seen["played again"] <= seen["schedules"] / 4, seen
