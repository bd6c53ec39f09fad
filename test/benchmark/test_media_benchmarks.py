"""The configs of the benchmarks of images, and what they count."""

from __future__ import annotations

from pathlib import Path

import bench_encoders as encoders
import bench_served as served
import pytest
import torch
from tower_configs import TOWERS

from sglang.srt.plan.media import describe_media
from sglang.srt.plan.towers.qwen3_vl import Qwen3VLTower


@pytest.mark.parametrize("name", list(TOWERS))
def test_towers_have_their_published_sizes(name: str) -> None:
    media = describe_media(TOWERS[name])
    assert media is not None
    assert media.tower.out_size == TOWERS[name]["text_config"]["hidden_size"]
    assert 0.4e9 < media.tower.num_weights() < 1.1e9


def test_products_are_those_of_the_layers(tmp_path: Path) -> None:
    """An image of 4 x 4 patches through a layer: each weight meets each patch, or each token, once."""
    config = TOWERS["Qwen3-VL-8B"]
    vision = config["vision_config"] | {"depth": 1, "deepstack_visual_indexes": []}
    encoder = encoders.encoder_of(config | {"vision_config": vision}, tmp_path, "cpu")
    tower = encoder.tower
    assert isinstance(tower, Qwen3VLTower)
    got = encoders.flops_of(encoder, torch.rand(16, tower.patch_values), (1, 4, 4))
    hidden, merged = tower.hidden_size, tower.hidden_size * 4
    of_patch = hidden * (tower.patch_values + 4 * hidden + 2 * tower.intermediate_size + 2 * 16)
    of_token = merged * (merged + tower.out_size)
    assert got == 2 * (16 * of_patch + 4 * of_token)


def test_gaps_are_between_events() -> None:
    assert served.Answer(times=[0.5, 0.75, 1.5]).gaps() == [0.25, 0.75]


def test_images_are_new_ones() -> None:
    bodies = [str(served.image_body(32, seed)) for seed in (0, 1, 0)]
    assert bodies[0] == bodies[2] != bodies[1]
