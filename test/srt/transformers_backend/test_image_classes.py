"""Classes of transformers that read images, through the scheduler: answers are those of their own `generate`, with
pictures that their own image processors prepare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.scheduler.scheduler import Scheduler
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end
from srt.models.media_harness import seeing_scheduler
from srt.transformers_backend.image_classes import CLASSES, ShownPrompt, generated, save_image_class

NEW_TOKENS = 8


class Seeing:
    """A tiny model on disk."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.model = name, folder, save_image_class(name, folder)

    def prompt(self) -> ShownPrompt:
        return ShownPrompt(self.name, self.folder)

    def scheduler(self, **options: Any) -> Scheduler:
        scheduler: Scheduler = seeing_scheduler(self.folder, model_impl="transformers", **options)
        return scheduler

    def check(self, scheduler: Scheduler, *prompts: ShownPrompt) -> None:
        collector = Collector()
        for i, prompt in enumerate(prompts):
            add(scheduler, prompt.request(f"r{i}", NEW_TOKENS))
        run_to_end(scheduler, collector)
        for i, prompt in enumerate(prompts):
            assert collector.tokens[f"r{i}"] == generated(self.model, prompt, NEW_TOKENS), f"prompt {i}"
        assert_clean(scheduler)


@pytest.fixture(scope="module", params=CLASSES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp("model"))


def encoded(scheduler: Scheduler) -> int:
    features = scheduler.media.features
    assert features is not None
    return features.num_encoded


def test_pictures_in_chunks_beside_texts(seeing: Seeing) -> None:
    """Chunks of 7 cut pictures; some prompts have several, and of other sizes."""
    prompts = [
        seeing.prompt().text(5, 1).image(1, 60, 40).text(4, 2),
        seeing.prompt().text(9, 3),
        seeing.prompt().text(2, 4).image(2, 30, 50).text(3, 5).image(3, 28, 28).image(4, 90, 20).text(2, 6),
    ]
    scheduler = seeing.scheduler(chunked_prefill_size=7)
    seeing.check(scheduler, *prompts)
    assert encoded(scheduler) == 4
    held = sum(p.tensor.nbytes for p in scheduler.runner.model.params.values())
    held += sum(p.tensor.nbytes for p in scheduler.media.features.encoder.params.values())  # type: ignore[union-attr]
    assert held == scheduler.plan.memory.weights


def test_prefixes_are_known_by_the_picture(seeing: Seeing) -> None:
    """The second prompt begins with the same picture, and the third with another of the same size."""
    scheduler = seeing.scheduler(page_size=1)
    first, again, other = (
        seeing.prompt().text(3, 1).image(seed, 40, 40).text(count, 2) for seed, count in ((1, 2), (1, 6), (2, 6))
    )
    seeing.check(scheduler, first)
    seeing.check(scheduler, again)
    cached = scheduler.stats._cached
    assert cached >= len(first.ids) - 1 and encoded(scheduler) == 1
    seeing.check(scheduler, other)
    assert scheduler.stats._cached - cached == 3 + other.seen[0][1][0][0] - 3 and encoded(scheduler) == 2
