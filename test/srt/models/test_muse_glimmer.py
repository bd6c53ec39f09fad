"""Muse-Glimmer as published: what its config says by layer, and what it may leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.layer_lists import UNROTATED
from sglang.srt.errors import UserError
from sglang.srt.plan.media import describe_media
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.towers.muse_glimmer.spec import MuseGlimmerTower

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "Muse-Glimmer-30B"
TOKENS = random_tokens(37, seed=1)


def changed(folder: Path, left_out: tuple[str, ...] = (), **keys: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k not in left_out} | keys
    file.write_text(json.dumps(config))


def test_layers_of_the_published_config() -> None:
    model = plan_for(PUBLISHED).description
    mixers = [layer.mixer for layer in model.layers]
    windows = [mixer.window for mixer in mixers if isinstance(mixer, GQA)]
    assert windows == [2048, 2048, 2048, 0] * 13
    kinds = {(m.window, m.rope.kind) for m in mixers if isinstance(m, GQA) and m.rope is not None}
    assert kinds == {(2048, "default"), (0, UNROTATED)}
    first = mixers[0]
    assert isinstance(first, GQA) and first.softmax.scale == pytest.approx(3.87 * 128**-0.5)
    assert (model.logits.cap, model.logits.scale) == (20.0, pytest.approx((6656 / 256) ** -0.5))


@pytest.mark.parametrize("gated", [True, False])
def test_a_config_without_gates_has_no_projection_of_them(gated: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((PUBLISHED / "config.json").read_text())
    changed(tmp_path, attn_output_gate=gated)
    weights = plan_for(tmp_path).description.layers[0].mixer.weights(512, 1)
    (parts,) = (part.parts for part in weights if isinstance(part, Matrix) and part.name == "attn.qkv")
    assert parts == (("q", "k", "v", "gate") if gated else ("q", "k", "v"))


def test_the_encoder_of_the_published_config() -> None:
    """Most keys are left to those of every published model."""
    media = describe_media(json.loads((PUBLISHED / "config.json").read_text()))
    assert media is not None and (media.image_token, media.video_token) == (200092, 200091)
    tower = media.tower
    assert isinstance(tower, MuseGlimmerTower) and tower.patch_shape == (3, 2, 14, 14)
    assert tower.full_layers == (*range(3, 50, 4), 49) and (tower.side, tower.adapter_size) == (32, 4096)
    assert tower.num_weights() == pytest.approx(1.922e9, rel=1e-3)
    assert tower.shared_by(8).ranks == 8


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    """The layers that do not rotate, and their windows, are then those of every published model."""
    model = save_tiny("muse_glimmer", tmp_path)
    changed(tmp_path, ("layer_rope_theta", "layer_types"))
    got = TinyRunner(plan_for(tmp_path)).extend({1: TOKENS})[0]
    torch.testing.assert_close(got, hf_logits(model, TOKENS), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_rope_theta": [0] * 7 + [1e4]}, "'layer_rope_theta' differs between layers of the type"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation = 'gelu_pytorch_tanh' is not supported"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("muse_glimmer", tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path).description.require_served()
