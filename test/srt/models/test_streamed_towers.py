"""Encoders whose layers lie in main memory: the features of resident ones, each layer copied once for a part, and two
of them on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some

from sglang.srt.errors import UserError
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_loader.loader import load_tower
from sglang.srt.plan.host_tables import with_encoder
from sglang.srt.towers.base.encoder import VisionEncoder, whole
from sglang.srt.towers.base.pieces import Cuts

from .media_harness import SEEING, args_of, grid_for, patch_values, save_seeing

QUICK = {"qwen3_vl", "gemma4", "kimi_k25", "step3p7", "llama4"}
SINGLE = "inkling_mm_model"
GRIDS = [(1, 4, 6), (3, 4, 6), (1, 8, 2)]


def towers_of(folder: Path) -> tuple[VisionEncoder[Any], VisionEncoder[Any]]:
    """With resident layers, and with layers in main memory."""
    plan = create_plan(args_of(folder))
    streamed = replace(plan, description=with_encoder(plan.description))
    one, other = load_tower(plan), load_tower(streamed)
    assert isinstance(one, VisionEncoder) and isinstance(other, VisionEncoder)
    return one, other


def pixels_of(name: str, folder: Path) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    grids = [grid_for(name, grid) for grid in GRIDS]
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    return torch.randn(count, patch_values(folder), generator=torch.Generator().manual_seed(1)), grids


@pytest.mark.parametrize("name", some([name for name in SEEING if name != SINGLE], QUICK))
def test_features_are_those_of_resident_layers(name: str, tmp_path: Path) -> None:
    save_seeing(name, tmp_path)
    resident, tower = towers_of(tmp_path)
    pixels, grids = pixels_of(name, tmp_path)
    assert resident.streamed is None and tower.streamed is not None
    for _ in range(2):
        got, want = tower.encode(pixels, grids), resident.encode(pixels, grids)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    parts, layers = len(tower.parts(grids)), tower.streamed.count
    assert layers > 1 and parts * layers - 1 <= tower.streamed.num_copied / 2 <= parts * layers


def test_encoder_steps_that_pause_within_layers_may_be_mixed(tmp_path: Path) -> None:
    save_seeing("qwen3_vl", tmp_path)
    resident, tower = towers_of(tmp_path)
    pixels, grids = pixels_of("qwen3_vl", tmp_path)
    want = resident.encode(pixels, grids)
    with torch.inference_mode():
        steps = [tower.encoding(tower.sent(pixels, grids), grids, Cuts(2, 2)) for _ in range(2)]
        for _ in range(3):
            next(steps[0])
        next(steps[1])
        for step in (steps[0], steps[1]):
            next(step)
        for step in steps:
            assert all(torch.equal(*pair) for pair in zip(whole(step), want, strict=True))


def test_what_cannot_lie_there_is_refused_by_name(tmp_path: Path) -> None:
    save_seeing(SINGLE, tmp_path)
    description = create_plan(args_of(tmp_path)).description
    with pytest.raises(UserError, match="--encoder-in-main-memory: the encoder of Inkling.* is a single layer"):
        with_encoder(description)
    with pytest.raises(UserError, match="--encoder-in-main-memory: no images are read here"):
        with_encoder(replace(description, media=None))


def test_memory_of_two_layers_is_planned(tmp_path: Path) -> None:
    save_seeing("qwen3_vl", tmp_path)
    resident, tower = towers_of(tmp_path)
    assert tower.streamed is not None
    spec, every = tower.tower, resident.tower.num_weights()
    sizes = spec.layer_sizes()
    assert len(sizes) == spec.num_layers and len({*sizes}) == 1
    assert spec.num_weights() == every - sum(sizes) + 2 * sizes[0]
    stored = {name for name in tower.params if name in tower.streamed.stored}
    assert stored == {name for name in tower.params if "blocks." in name}
    assert sum(tower.params[name].tensor.numel() for name in stored) == sum(sizes)
    assert len({*(tensor.data_ptr() for tensor in tower.streamed.stored.values())}) == len(stored)
