"""Muse-Spark's encoder, which is Muse-Glimmer's with learned positions in another order: beside transformers' class,
and beside a sampled grid, as the publisher's code reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

from sglang.srt.plan.media import describe_media
from sglang.srt.towers.base.patch_places import ROW_BY_ROW, Grid, num_patches, windows
from sglang.srt.towers.muse_glimmer.encoder import MuseGlimmerEncoder

from .ling3_reference import save
from .muse_spark_reference import CONFIG, weights
from .test_towers import BATCHES, TOLERANCE, tower_of

VISION: dict[str, Any] = {
    "model_type": "muse_spark_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "patch_temporal": 2,
    "merge_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
    "layer_types": ["window_attention", "full_attention", "window_attention"],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu",
}
SEEING = CONFIG | {"vision_config": VISION, "out_hidden_size": 128, "projector_hidden_size": 40}
VALUES = 3 * 2 * 4 * 4


def seeing(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a model with an encoder, and returns the encoder's tensors."""
    media = describe_media(SEEING)
    assert media is not None
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in media.tower.shapes()}
    save(folder, SEEING, weights() | tensors)
    return tensors


def encoder_of(folder: Path) -> MuseGlimmerEncoder:
    tower = tower_of(folder)
    assert isinstance(tower, MuseGlimmerEncoder)
    return tower


@pytest.mark.parametrize("grid", [(1, 4, 4), (1, 2, 10), (2, 6, 4)])
def test_learned_positions(grid: Grid, tmp_path: Path) -> None:
    """The publisher's code samples the table at a mesh of rows and columns in the order x, y."""
    table = seeing(tmp_path)["model.vision_tower.patch_embedder.position_embedding_table.weight"]
    encoder, (frames, rows, columns) = encoder_of(tmp_path), grid
    places = {name: torch.from_numpy(array) for name, array in encoder.places([grid]).items()}
    order, _ = windows([grid], ROW_BY_ROW, 4)
    got = torch.empty(num_patches([grid]), 32)
    got[torch.from_numpy(order)] = encoder._interpolated(table, places)
    at = [(torch.arange(size) + 0.5) * 2 / size - 1 for size in (rows, columns)]
    mesh = torch.stack(torch.meshgrid(*at, indexing="xy"), dim=-1)
    image = table.view(4, 4, 32).permute(2, 0, 1)[None]
    want = F.grid_sample(image, mesh[None], align_corners=False)[0].flatten(1).T
    torch.testing.assert_close(got, want.repeat(frames, 1), rtol=1e-5, atol=1e-5)


def test_features_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers has the class from 5.24 on."""
    config_class = getattr(transformers, "MuseSparkConfig", None)
    assert (config_class is None) == (Version(transformers.__version__) < Version("5.24"))
    if config_class is None:
        return
    tensors = seeing(tmp_path)
    sound = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": 64}
    config = config_class(**{key: SEEING[key] for key in SEEING if key != "architectures"}, audio_config=sound)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    given = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert not model.load_state_dict(given, strict=False).unexpected_keys
    tower = encoder_of(tmp_path)
    for grids in BATCHES.values():
        pixels = torch.randn(num_patches(grids), VALUES, generator=torch.Generator().manual_seed(len(grids)))
        with torch.no_grad():
            want = model.get_image_features(pixels, torch.tensor(grids)).pooler_output
        got = tower.encode(pixels, grids)
        assert len(got) == len(want) == len(grids)
        for item, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(item, wanted, rtol=TOLERANCE, atol=TOLERANCE)
