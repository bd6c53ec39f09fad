"""Hy4: what its config states and leaves out, names of tensors in files of several writers, and its text model inside
of the one with images. Parity of the text model with transformers is in `test_parity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.mla.spec import MLA, Indexer
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import ElementGate
from sglang.srt.plan.model_description import ModelDescription, describe_model

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "kernels" / "published" / "Hy4-preview" / "config.json").read_text()
)


def described(**changes: Any) -> ModelDescription:
    return describe_model({key: value for key, value in (PUBLISHED | changes).items() if value is not ...}, None)


def test_the_published_config() -> None:
    model = described()
    mixer, ffn = model.layers[1].mixer, model.layers[1].ffn
    assert isinstance(mixer, MLA) and isinstance(ffn, MoE) and ffn.shared is not None
    assert mixer.indexer == Indexer(32, 128, 2048, is_neox_style=True, rotary_last=True, key_eps=1e-5)
    assert mixer.rope is not None and mixer.rope.is_neox_style
    assert mixer.sinks and mixer.gate == ElementGate(own_projection=True)
    assert model.layers[1].residual == HyperConnections(4, 0, 1e-6, magnitude=2.0)
    assert ffn.activation.limit == 10.0 and ffn.shared.activation is not None
    assert ffn.shared.activation.limit is None, "only routed experts have a limit"
    own = [i for i, layer in enumerate(model.layers) if not layer.mixer.follows_layer]
    assert own == [0, *range(1, 78, 4)], "the others take the selection of the layer before them"


def test_what_a_config_may_leave_out() -> None:
    left_out = ("indexer_types", "mlp_layer_types", "hc_mult", "hc_magnitude", "hc_eps", "swiglu_limit", "gated_mla")
    assert described(**dict.fromkeys(left_out, ...)).layers == described().layers


@pytest.mark.parametrize(
    ("key", "value"),
    [("gating_type", "headwise"), ("learnable_sink", False), ("enable_ihc", False), ("attention_bias", True)],
)
def test_forms_that_are_not_computed_are_refused(key: str, value: object) -> None:
    assert any(key in problem for problem in described(**{key: value}).unsupported)


def test_a_selection_is_needed() -> None:
    with pytest.raises(UserError, match="index_topk"):
        described(index_topk=...)


@pytest.mark.parametrize(
    ("keys", "pairs"),
    [
        ({}, False),
        ({"rope_interleave": True}, True),
        ({"model_type": "hy_v4_vl", "architectures": ["HYV4VLForConditionalGeneration"]}, True),
    ],
)
def test_what_rotates_together(keys: dict[str, Any], pairs: bool) -> None:
    """Halves in the text model of transformers, pairs in its model with images."""
    mixer = described(**keys).layers[0].mixer
    assert (mixer.rope.is_neox_style, mixer.indexer.is_neox_style) == (not pairs, not pairs)


SPELLINGS = {
    "hc_pre behind": (".hc_pre.hc_attn_layer.hc_", ".hc_attn_layer.hc_pre.hc_"),
    "without hc_pre": (".hc_pre.hc_", ".hc_"),
    "gates by their usual name": ("mlp.linear_gate", "mlp.gate_proj"),
    "gates of attention by their class's name": ("self_attn.linear_gate", "self_attn.gate_proj"),
    "below a model with images": ("model.", "model.language_model."),
}


def saved(folder: Path, spelling: tuple[str, str]) -> tuple[list[int], torch.Tensor]:
    """Writes a tiny model whose tensors have other names. Returns tokens, and their logits by transformers."""
    reference = save_tiny("hy_v4", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace(*spelling): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file)
    tokens = random_tokens(40, seed=1)
    return tokens, hf_logits(reference, tokens)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_names_of_other_writers(tmp_path: Path, spelling: tuple[str, str]) -> None:
    tokens, expected = saved(tmp_path, spelling)
    if "language_model" in spelling[1]:
        beside_an_encoder(tmp_path)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-3)


def beside_an_encoder(folder: Path) -> None:
    """Writes the config of the model with images, and a tensor of its encoder."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"vit.perceive.norm.weight": torch.ones(4)}, file)
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "hy_v4_vl_text"}
    text |= {"rope_interleave": False}  # as in the reference, unlike in those published
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    outer = {"architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": text, "dtype": "float32"}))
