"""Laguna beyond parity: the names of published checkpoints, which layers have no experts, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.errors import UserError

from .harness import TinyRunner, plan_for, save_tiny
from .quantized_checkpoints import FORMS, save_quantized
from .test_quantized import TOLERANCE, steps, wanted


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= keys
    written = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))


def test_published_names_and_layers(tmp_path: Path) -> None:
    """Without a list of them the first layer has no experts; heads differ by layer, KV heads do not."""
    save_tiny("laguna", tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"model.layers.1.mlp.experts.e_score_correction_bias", "model.layers.1.self_attn.g_proj.weight"} <= names
    assert "model.layers.1.mlp.shared_expert.down_proj.weight" in names
    changed(tmp_path, mlp_layer_types=None)
    layers = plan_for(tmp_path).description.layers
    assert [isinstance(layer.ffn, Dense) for layer in layers] == [True, False, False, False]
    heads = [(layer.mixer.num_heads, layer.mixer.window) for layer in layers if isinstance(layer.mixer, GQA)]
    assert heads == [(4, 0), (6, 12), (6, 12), (4, 0)]


@pytest.mark.parametrize("form", ["fp8_block", "compressed_fp8_channel", "compressed_nvfp4", "modelopt_nvfp4"])
def test_quantized_checkpoints(form: str, tmp_path: Path) -> None:
    """Gates of heads stay in 16 bits."""
    reference = save_quantized("laguna_wide", FORMS[form], tmp_path, experts_apart=True)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gating": "per-element"}, "gating = 'per-element' is not supported"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping = 30.0 is not supported"),
        ({"num_attention_heads_per_layer": [4, 6]}, "'num_attention_heads_per_layer' must be 4 numbers"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("laguna", tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path).description.require_served()
