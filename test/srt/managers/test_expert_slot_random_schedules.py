"""Random schedules, as in `test_random_schedules`, of models whose experts lie in main memory, with retraction, drafts,
prompts in chunks beside requests that decode, and caches in FP8: every request gets the tokens that it gets alone of
the resident model, for any number of slots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from matrix import FEATURES, cells, kinds

from ..models.harness import plan_for
from .test_random_schedules import DRAFT_TOKENS, FEW_PROMPTS, Schedule, World, short_pauses

FEATURE = "experts in main memory"
CACHES = ("auto", "fp8_e4m3")
Drawn = tuple[int, str, str]
"""What is added to the fewest slots, negative: subtracted from the number of experts; draft tokens; cache."""
SEEDS = 3
QUICK: tuple[Drawn, ...] = ((0, "half-right", "fp8_e4m3"), (1, "none", "fp8_e4m3"), (-1, "right", "fp8_e4m3"))


def check(name: str, folder: Path, drawn: tuple[Drawn, ...], seed: int, seeds: int = SEEDS) -> None:
    seen, copied = Counter[str](), 0
    residents: dict[str, World] = {}
    with short_pauses():
        for number, (more, draft_tokens, cache) in enumerate(drawn):
            options = {"kv_cache_dtype": cache}
            if cache not in residents:
                residents[cache] = World(name, folder / cache, options=options, num_prompts=FEW_PROMPTS)
                residents[cache].folder.mkdir()
            resident = residents[cache]
            resident.prepare()
            experts = plan_for(resident.folder).description.experts
            assert experts is not None
            fewest, most = (count + experts.fused_shared for count in (experts.top_k, experts.num_experts))
            options |= {**FEATURES[FEATURE].flags, "paged_experts_num_resident": (most if more < 0 else fewest) + more}
            world = World(name, resident.folder, options=options, prompts=resident.prompts, outputs=resident.outputs)
            for ids in resident.prompts:
                resident.alone(ids)
            for at in range(seeds):
                schedule = Schedule(world, draft_tokens, 4, seed + number * seeds + at)
                schedule.run()
                seen += schedule.seen
            buffers = world.runner(4, draft_tokens)[1].model.expert_buffers
            assert buffers is not None
            asked_and_copied = buffers.totals()
            assert asked_and_copied is not None
            copied += asked_and_copied[1]
    assert copied and seen["retracted"] and seen["resumed"], seen


@pytest.mark.parametrize("name", ["experts", "sinks"])
def test_random_schedules(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, QUICK, seed=10, seeds=1)


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "name", [name for _, name in cells(kinds("experts", lacking="embedded"), ["one rank"], FEATURE)]
)
def test_many_random_schedules(name: str, tmp_path: Path) -> None:
    caches = [cache for cache in CACHES if cache == "auto" or cells([name], ["one rank"], "fp8")]
    drawn = tuple((more, draft, cache) for more in (0, 1, 2, -2, -1) for draft in DRAFT_TOKENS for cache in caches)
    check(name, tmp_path, drawn, seed=100)
