"""Encoder steps and evictions: a step has the features of its chunks, and there is room for what is computed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.media_steps import MediaSteps
from sglang.srt.managers.scheduler.prompt_media import PromptMedia
from sglang.srt.managers.scheduler.running_batch import RunningBatch
from sglang.srt.managers.scheduler.schedule_batch import Req
from sglang.srt.managers.scheduler.schedule_policy import PrefillBudget
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.plan.media import MediaDescription
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.utils.media_item import MediaItem
from sglang.srt.utils.shared_array import SharedArray

BUDGET_TOKENS, WIDTH = 100, 2
TOWER: Any = SimpleNamespace(num_tokens=lambda grid: math.prod(grid) // 4, pooled_frames=1, deepstack=(), merge=2)
DESCRIPTION = MediaDescription(1, None, sections=False, tower=TOWER)


class Counting:
    """An encoder that notes how many bytes of features the cache holds whenever it computes."""

    def __init__(self) -> None:
        self.features: MediaFeatures | None = None
        self.held: list[int] = []

    def computed(self, items: list[MediaItem]) -> list[torch.Tensor]:
        assert self.features is not None
        cached = self.features._entries.values()
        self.held.append(sum(entry.size for entry in cached) + sum(map(self.features.size_of, items)))
        return [torch.zeros(self.features.description.num_tokens(item.grid), WIDTH) for item in items]


@pytest.fixture
def encoder() -> Counting:
    return Counting()


@pytest.fixture
def steps(encoder: Counting, monkeypatch: pytest.MonkeyPatch) -> MediaSteps:
    budget = BUDGET_TOKENS * WIDTH * torch.float32.itemsize
    features = MediaFeatures(DESCRIPTION, WIDTH, torch.float32, budget, "cpu", None, sliced=False)
    encoder.features = features
    monkeypatch.setattr(features, "_computed", encoder.computed)
    return MediaSteps(features, lambda: 1000, page_size=1)


def seeing(rid: str, *images: tuple[str, int]) -> Any:
    """Returns a request whose prompt is images, each with a name and a number of tokens."""
    items, begin = [], 0
    for name, tokens in images:
        digest, pixels = name.encode().ljust(32, b"."), SharedArray("none", [4 * tokens, 1], "float32")
        items.append(
            MediaItem(
                kind="image", digest=digest, spans=[(begin, begin + tokens)], grid=(1, 2, 2 * tokens), pixels=pixels
            )
        )
        begin += tokens
    return SimpleNamespace(rid=rid, media=PromptMedia(items, begin, DESCRIPTION), kv_len=0)


def gathered(steps: MediaSteps, req: Any, end: int) -> int:
    """Returns how many rows of features the chunk of a request up to `end` reads."""
    assert steps.features is not None
    needed = req.media.needed(0, end)
    index = torch.from_numpy(np.concatenate([rows.features for rows in needed]))
    return len(steps.features.gather_features([(rows.item, rows.features) for rows in needed], index))


def half_encoded(steps: MediaSteps, image: tuple[str, int]) -> None:
    """Begins the encoder step of an image beside requests that decode; its request then ends."""
    request = seeing("gone", image)
    steps.begin(num_decodes=3)
    assert steps.ready(request, 0, image[1]) == 0
    steps.end(request)
    assert steps.features is not None and steps.features.is_encoding


def test_an_encoder_step_begins_with_the_eviction_and_not_with_a_chunk_in_the_step(steps: MediaSteps) -> None:
    """The large image is cached before the other encoder step begins, which needs its place."""
    steps.begin(num_decodes=0)
    before = seeing("before", ("large", 60))
    assert steps.ready(before, 0, 60) == 60
    steps.end(before)
    half_encoded(steps, ("left over", 60))
    steps.begin(num_decodes=0)
    first, second = seeing("first", ("large", 60)), seeing("second", ("small", 5))
    counts = [steps.ready(first, 0, 60), steps.ready(second, 0, 5)]
    assert counts == [60, 5]
    assert gathered(steps, first, 60) == 60 and gathered(steps, second, 5) == 5


def test_a_chunk_whose_first_image_is_cached_waits_for_a_left_over_step(steps: MediaSteps) -> None:
    steps.begin(num_decodes=0)
    before = seeing("before", ("cached", 30))
    assert steps.ready(before, 0, 30) == 30
    steps.end(before)
    half_encoded(steps, ("left over", 90))
    steps.begin(num_decodes=0)
    both = seeing("both", ("cached", 30), ("new", 40))
    assert steps.ready(both, 0, 70) == 70
    assert gathered(steps, both, 70) == 70


def test_there_is_room_for_features_before_they_are_computed(steps: MediaSteps, encoder: Counting) -> None:
    for name in ("one", "two", "three"):
        steps.begin(num_decodes=0)
        request = seeing(name, (name, 60))
        assert steps.ready(request, 0, 60) == 60
        steps.end(request)
    assert steps.features is not None
    assert len(encoder.held) == 3 and max(encoder.held) <= steps.features.budget


def ends_of_steps(kv: KVTable, length: int, runs: list[tuple[int, int]], **fields: Any) -> list[int]:
    """Returns where the steps of a prompt end whose runs of image tokens must not be cut."""
    tower: Any = SimpleNamespace(num_tokens=lambda grid: grid[1], pooled_frames=1)
    items: Any = [
        SimpleNamespace(
            spans=[run],
            grid=(1, run[1] - run[0], 1),
            pixels=SimpleNamespace(shape=[run[1] - run[0]]),
            digest=b"d" * 32,
            kind="image",
        )
        for run in runs
    ]
    description: Any = SimpleNamespace(tower=tower, num_tokens=tower.num_tokens, both_ways=True, sections=False, fill=0)
    req: Any = SimpleNamespace(
        tokens=[0] * length, limit=length + 100, slot=0, media=PromptMedia(items, length, description),
        prompt_len=length, logprob_start=0, prompt_logprobs_done=0, logprob_width=1, wants_prompt_logprobs=False,
    )  # fmt: skip
    vars(req).update(fields)
    req.prompt_logprobs_in = lambda begin, count: Req.prompt_logprobs_in(req, begin, count)
    begin, ends = 0, list[int]()
    while begin < length and len(ends) < 20:
        budget = PrefillBudget(kv, RunningBatch(Counters(5), 1, 0, 1), 0.5, 8192, 2048, 0)
        begin = req.media.uncut_end(begin, begin + budget.take(req, begin))
        req.prompt_logprobs_done = begin
        ends.append(begin)
    return ends


@pytest.mark.parametrize("page", [1, 64])
def test_a_run_that_must_not_be_cut_is_computed_with_however_many_log_probabilities(page: int) -> None:
    """A step that could take only a part of it would take nothing, and neither would any later one."""
    kv = KVTable(PoolSizes(20_000 // page * page, page, 4, 4096))
    ends = ends_of_steps(kv, 400, [(20, 300)], logprob_width=1024, wants_prompt_logprobs=True)
    assert ends[-1] == 400 and 300 in ends


@pytest.mark.parametrize(
    ("runs", "ends"),
    [
        ([(10, 60)], [96, 100]),
        ([(70, 98)], [64, 100]),
        ([(33, 70), (70, 98)], [32, 100]),
        ([(64, 98)], [64, 100]),
        ([(10, 98)], [100]),
    ],
)
def test_a_prompt_pauses_at_the_last_whole_page_outside_of_runs(runs: list[tuple[int, int]], ends: list[int]) -> None:
    """A state is kept only there: a pause where a run begins would cost a step and keep none."""
    kv = KVTable(PoolSizes(4096, 16, 4, 4096, has_states=True, checkpoints=4))
    assert ends_of_steps(kv, 100, runs) == ends
