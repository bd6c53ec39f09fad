"""Classes of transformers that read images, through the scheduler: answers are those of their own `generate`, with
pictures that their own image processors prepare."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan, create_runner
from srt.managers.fake_runner import Collector, add, assert_clean, run_to_end
from srt.models.media_harness import again_in_graphs, args_of, seeing_scheduler
from srt.transformers_backend.image_classes import (
    CLASSES,
    ShownPrompt,
    generated,
    picture,
    save_image_class,
    views_of,
)

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


QUICK = ("llava", "smolvlm", "internvl", "mistral3")
"""The others have the forms of these, with other texts around runs."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in CLASSES],
)
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


MARKS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "start_of_img_token": "<|START_OF_IMG|>",
        "end_of_img_token": "<|END_OF_IMG|>",
        "tile_token": "TILE",
        "tile_global_token": "TILE_GLOBAL",
        "img_patch_token": "#",
        "img_size": 28,
        "patch_size": 14,
    },
    "idefics3": {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>",
        "image_token": "#",
        "image_seq_len": 4,
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "image_token": "#",
        "image_seq_length": 4,
    },
}
"""What the processors of transformers have of their tokenizers. # is a placeholder."""


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("size", [(90, 40), (20, 24)])
def test_texts_around_pictures_are_those_of_transformers(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    save_image_class(name, tmp_path)
    views = views_of(tmp_path, picture(1, *size))
    ours = "".join("#" * part if isinstance(part, int) else part for part in views.parts)
    folder, kind, settings = CLASSES[name].processor
    images = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    asked = {"return_row_col_info": True} if name == "idefics3" else {"crop_to_patches": True}
    made = getattr(images, f"{kind}Pil")(**settings)(picture(1, *size), return_tensors="np", **asked)
    texts = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    write = getattr(texts, f"{CLASSES[name].architecture}Processor").replace_image_token
    assert write(SimpleNamespace(**MARKS[name]), made, 0) == ours
    assert ours.count("#") == sum(patches.num_tokens for patches in views.patches)


def test_text_alone_needs_no_encoder(tmp_path: Path) -> None:
    model = save_image_class("llava", tmp_path)
    args = args_of(tmp_path, model_impl="transformers", language_model_only=True)
    scheduler = Scheduler(args, create_runner(args), StopChecker(None))
    prompt = ShownPrompt("llava", tmp_path).text(9, 3)
    assert answers(scheduler, [prompt]) == [generated(model, prompt, NEW_TOKENS)]
    assert scheduler.media.features is None
    decoder = sum(p.numel() for name, p in model.named_parameters() if "language_model" in name or "lm_head" in name)
    assert scheduler.plan.memory.weights == 4 * decoder


def test_what_is_refused(tmp_path: Path) -> None:
    save_image_class("llava", tmp_path)
    with pytest.raises(UserError, match="--mm-enable-dp-encoder shares out frames"):
        create_plan(args_of(tmp_path, tp_size=2, mm_enable_dp_encoder=True))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViltImageProcessor"}))
    with pytest.raises(UserError, match="'ViltImageProcessor' here, only by CLIPImageProcessor.*--language-model-only"):
        views_of(tmp_path, picture(1, 28, 28))
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["image_size"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="0 x 0 pixels are no squares of 7 a side"):
        create_plan(args_of(tmp_path))


def answers(scheduler: Scheduler, prompts: list[ShownPrompt]) -> list[list[int]]:
    collector = Collector()
    for i, prompt in enumerate(prompts):
        add(scheduler, prompt.request(f"r{i}", NEW_TOKENS))
    run_to_end(scheduler, collector)
    return [collector.tokens[f"r{i}"] for i in range(len(prompts))]


def some_prompts(name: str, folder: Path) -> list[ShownPrompt]:
    return [
        ShownPrompt(name, folder).text(5, 1).image(1, 60, 40).text(4, 2),
        ShownPrompt(name, folder).text(9, 3),
        ShownPrompt(name, folder).image(3, 28, 28).text(3, 5).image(1, 60, 40).text(2, 6),
    ]


def test_steps_with_pictures_in_graphs(tmp_path: Path) -> None:
    model, prompts = save_image_class("llava", tmp_path), some_prompts("llava", tmp_path)
    scheduler = seeing_scheduler(tmp_path, model_impl="transformers", chunked_prefill_size=16)
    got = again_in_graphs(scheduler, lambda scheduler: answers(scheduler, prompts))
    assert got == [generated(model, prompt, NEW_TOKENS) for prompt in prompts]


LAYOUTS = {"TP2": {"tp_size": 2}, "PP2": {"pp_size": 2}}


def _rank(rank: int, folder: Path, layout: str) -> None:
    torch.set_num_threads(1)
    scheduler = seeing_scheduler(
        folder, rank=rank, rendezvous=f"file://{folder}/{layout}", chunked_prefill_size=7,
        model_impl="transformers", **LAYOUTS[layout],
    )  # fmt: skip
    (folder / f"{layout}.{rank}.json").write_text(json.dumps(answers(scheduler, some_prompts("mistral3", folder))))
    parallel_state.shutdown()


@pytest.mark.parametrize("layout", [pytest.param("TP2", marks=pytest.mark.thorough), "PP2"])
def test_ranks_say_what_one_rank_says(layout: str, tmp_path: Path) -> None:
    """Every rank encodes, or those of the first stage."""
    model = save_image_class("mistral3", tmp_path)
    run_ranks(_rank, (tmp_path, layout), 2)
    want = [generated(model, prompt, NEW_TOKENS) for prompt in some_prompts("mistral3", tmp_path)]
    assert [json.loads((tmp_path / f"{layout}.{rank}.json").read_text()) for rank in range(2)] == [want, want]
