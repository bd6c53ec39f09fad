"""Encoders of images and videos against those of transformers, from checkpoints that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_loader.loader import load_tower
from sglang.srt.models.vision import qwen3_vl
from sglang.srt.models.vision.patch_places import Grid, parts_of_frames
from sglang.srt.models.vision.qwen3_vl import Qwen3VLTower
from sglang.srt.plan import media
from srt.managers.fake_runner import Collector, add, run_to_end

from .media_harness import (
    PATCH_VALUES,
    SEEING,
    Prompt,
    ReferenceEncoder,
    args_of,
    greedy,
    media_request,
    save_seeing,
    seeing_scheduler,
)

BATCHES: dict[str, list[Grid]] = {
    "an image": [(1, 4, 6)],
    "two sizes": [(1, 8, 2), (1, 2, 10)],
    "a video between images": [(1, 4, 4), (3, 4, 6), (1, 6, 2)],
    "one token": [(1, 2, 2)],
}
TOLERANCE = 1e-4
NEW_TOKENS = 16
WITH_TOWER = [name for name in SEEING if name in media.ENCODERS]


def tower_of(folder: Path) -> Qwen3VLTower:
    tower = load_tower(create_plan(args_of(folder)))
    assert tower is not None
    return tower


@pytest.mark.parametrize("name", WITH_TOWER)
def test_features_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, tower = ReferenceEncoder(save_seeing(name, tmp_path)), tower_of(tmp_path)
    for grids in BATCHES.values():
        count = sum(frames * rows * columns for frames, rows, columns in grids)
        pixels = torch.randn(count, PATCH_VALUES, generator=torch.Generator().manual_seed(count))
        got, want = tower.encode(pixels, grids), reference.encode(pixels, grids)
        assert len(got) == len(want) == len(grids)
        for item, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(item, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", WITH_TOWER)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """From pixels to tokens, a video among images."""
    model = save_seeing(name, tmp_path)
    scheduler, collector = seeing_scheduler(tmp_path), Collector()
    prompt = Prompt().text(4, 7).image((3, 4, 4), 30).text(5, 8).image((1, 4, 6), 31).text(3, 9)
    add(scheduler, media_request("seen", prompt, tmp_path, NEW_TOKENS))
    run_to_end(scheduler, collector)
    output = collector.tokens["seen"]
    assert len(output) == NEW_TOKENS and output == greedy(model, prompt, output)


def test_a_long_video_is_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_seeing("qwen3_vl", tmp_path)
    tower, grids = tower_of(tmp_path), [(1, 4, 4), (5, 2, 4), (1, 6, 4)]
    pixels = torch.randn(80, PATCH_VALUES, generator=torch.Generator().manual_seed(1))
    want = tower.encode(pixels, grids)
    monkeypatch.setattr(qwen3_vl, "PATCHES_A_STEP", 20)
    assert [len(run) for run in parts_of_frames(grids, 20)] == [1, 2, 2, 1, 1]
    for got, wanted in zip(tower.encode(pixels, grids), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def misshapen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def doubled(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name.replace("blocks.0", "blocks.9")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [(without, "lacks weights of the model: "), (misshapen, "has shape"), (doubled, "weights that the model does not")],
)
def test_other_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor], str], None], says: str, tmp_path: Path
) -> None:
    save_seeing("qwen3_vl", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.visual.blocks.0.attn.qkv.weight"
    tensors = safetensors.torch.load_file(file)
    change(tensors, name)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(UserError, match=f"{says}.*|.*model.visual.blocks"):
        tower_of(tmp_path)


def test_the_weights_are_in_the_memory_plan(tmp_path: Path) -> None:
    save_seeing("qwen3_vl", tmp_path)
    plan = create_plan(args_of(tmp_path))
    alone = create_plan(args_of(tmp_path, language_model_only=True))
    tower = tower_of(tmp_path)
    size = sum(param.tensor.nbytes for param in tower.params.values())
    assert plan.memory.weights - alone.memory.weights == size > 0
    assert load_tower(alone) is None
