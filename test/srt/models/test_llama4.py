"""Llama 4 beyond parity: keys that published configs leave out, layers that are mixed otherwise, the names and formats
of published checkpoints, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization import reference
from sglang.srt.towers.llama4.spec import describe_llama4

from .harness import (
    LLAMA3_ROPE,
    SIZES,
    TINY,
    TinyRunner,
    blocks_of,
    hf_logits,
    plan_for,
    random_tokens,
    randomize,
    save_tiny,
)
from .quantized_checkpoints import FORMS, save_quantized, write_model
from .test_quantized import TOLERANCE, steps, wanted

PUBLISHED = Path(__file__).parents[1] / "kernels/published"
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    written = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize(
    "keys",
    [
        {"use_qk_norm": False, "interleave_moe_layer_step": 1, "rope_parameters": PLAIN_ROPE},
        {"attn_temperature_tuning": False, "moe_layers": [0, 3], "rope_parameters": LLAMA3_ROPE},
        {"layer_types": ["full_attention", "chunked_attention"] * 2, "no_rope_layers": [0, 1, 1, 0]},
    ],
    ids=["Scout and Maverick mixed", "no growth", "layers of every kind"],
)
def test_other_models_of_the_family(keys: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = save_tiny("llama4", tmp_path, **keys), random_tokens(41, seed=1)
    runner = TinyRunner(plan_for(tmp_path))
    got = torch.cat((runner.extend({1: tokens[:17]})[0], runner.extend({1: tokens[17:]})[0]))
    torch.testing.assert_close(got, hf_logits(model, tokens), **CLOSE)


def test_rotations_of_as_many_positions_as_the_plan_has(tmp_path: Path) -> None:
    """Of a context of ten million tokens."""
    model, tokens = save_tiny("llama4", tmp_path, max_position_embeddings=10_485_760), random_tokens(41, seed=1)
    runner = TinyRunner(replace(plan_for(tmp_path), num_positions=48))
    mixers = [blocks_of(layer)[0] for layer in runner.model.layers]
    assert {mixer.rotary.cos_sin.shape[0] for mixer in mixers if not mixer.rotary.one_row} == {48}
    got = torch.cat((runner.extend({1: tokens[:17]})[0], runner.extend({1: tokens[17:]})[0]))
    torch.testing.assert_close(got, hf_logits(model, tokens), **CLOSE)


def test_keys_that_published_configs_leave_out(tmp_path: Path) -> None:
    """Which layers rotate, see chunks and have experts follows from two numbers; a flag was a number first."""
    model, tokens = save_tiny("llama4", tmp_path), random_tokens(41, seed=1)
    changed(tmp_path, layer_types=None, no_rope_layers=[], moe_layers=None, attn_temperature_tuning=4)
    changed(tmp_path, no_rope_layer_interval=None, router_jitter_noise=None)
    plan = plan_for(tmp_path)
    mixers = [layer.mixer for layer in plan.description.layers]
    assert [(mixer.window, mixer.mask.chunked) for mixer in mixers if isinstance(mixer, GQA)] == [(12, True)] * 3 + [
        (0, False)
    ]
    assert [isinstance(layer.ffn, MoE) for layer in plan.description.layers] == [False, True] * 2
    torch.testing.assert_close(TinyRunner(plan).extend({1: tokens})[0], hf_logits(model, tokens), **CLOSE)


def test_published_names_beside_an_encoder(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    vision |= {"image_size": 56, "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48}
    text = {**SIZES, **TINY["llama4"][1]}
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    randomize(model, False)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in names
    assert "language_model.lm_head.weight" in names and any(name.startswith("vision_model.") for name in names)
    tokens = random_tokens(41, seed=1)
    torch.testing.assert_close(
        TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0], hf_logits(model.language_model, tokens), **CLOSE
    )


def test_the_published_encoder_has_as_many_weights() -> None:
    """Numbers of a listing of Scout's modules."""
    config = ConfigReader(json.loads((PUBLISHED / "Llama-4-Scout-17B-16E-Instruct/config.json").read_text()), "config")
    tower = describe_llama4(config, ConfigReader(config.default("vision_config", dict, {}), "vision_config"))
    counts = {name: math.prod(shape) for name, shape in tower.shapes()}
    expected = {
        "vision_model.positional_embedding_vlm": 812_416,
        "vision_model.patch_embedding.linear.weight": 827_904,
        "vision_model.model.layers.33.self_attn.q_proj.weight": 1_982_464,
        "vision_model.model.layers.33.mlp.fc1.weight": 7_929_856,
        "vision_model.vision_adapter.mlp.fc1.weight": 23_068_672,
        "vision_model.vision_adapter.mlp.fc2.weight": 16_777_216,
        "multi_modal_projector.linear_1.weight": 20_971_520,
    }
    assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize("form", ["compressed_fp8_channel", "compressed_int4_g128", "compressed_nvfp4"])
def test_experts_that_are_quantized_one_by_one(form: str, tmp_path: Path) -> None:
    """As llm-compressor writes them: Maverick in FP8 by channel, Scout in four bits."""
    source = save_quantized("llama4_wide", FORMS[form], tmp_path, experts_apart=True)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(source), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def save_joined(scheme: str, form: str, folder: Path) -> Path:
    """As ModelOpt writes them: each product of all experts is one tensor with one number for all, columns first."""
    save_tiny("llama4_wide", folder / "reference")
    file = folder / "reference" / "model.safetensors"
    tensors, stored = load_file(file), {}
    for key, tensor in list(tensors.items()):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = tensor
            continue
        rows = tensor.transpose(1, 2).flatten(0, 1)
        made = reference.quantize(rows, SCHEMES[scheme])
        tensors[key] = reference.dequantize(made, SCHEMES[scheme]).view(tensor.transpose(1, 2).shape).transpose(1, 2)
        tensors[key] = tensors[key].contiguous()
        of_expert = (len(tensor), -1)
        stored[key] = made.data.unflatten(0, of_expert).transpose(1, 2).contiguous()
        stored[f"{key}_input_scale"] = torch.tensor(0.05)
        if made.global_scale is None:
            stored[f"{key}_weight_scale"] = made.scale.reshape(())
        else:
            stored[f"{key}_weight_scale"] = made.scale.unflatten(0, of_expert).transpose(1, 2).contiguous()
            stored[f"{key}_weight_scale_2"] = made.global_scale.reshape(())
    save_file(tensors, file, {"format": "pt"})
    excluded = ["lm_head", "*self_attn*", "*router", "*shared_expert*", "*layers.0.*"]
    inner = dict(FORMS[form].modelopt["quantization"]) | {"exclude_modules": excluded}
    written = type(FORMS[form])(FORMS[form].write, modelopt={"producer": {"name": "modelopt"}, "quantization": inner})
    write_model(folder, stored, written)
    return folder / "reference"


@pytest.mark.parametrize(("scheme", "form"), [("fp8_tensor", "modelopt_fp8"), ("nvfp4", "modelopt_nvfp4")])
def test_experts_that_are_quantized_together(scheme: str, form: str, tmp_path: Path) -> None:
    source = save_joined(scheme, form, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(source), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 2}, "weights multiply what an expert takes, but 2 experts take it"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types sliding_attention are not described here yet"),
        ({"no_rope_layers": [1, 2, 1, 0]}, "'no_rope_layers' must be a list of 0 and 1; got "),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("llama4", tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path).description.require_served()


def test_dense_layers_are_wider(tmp_path: Path) -> None:
    save_tiny("llama4", tmp_path)
    layers = plan_for(tmp_path).description.layers
    assert {layer.ffn.intermediate_size for layer in layers if isinstance(layer.ffn, Dense)} == {160}
    experts = layers[1].ffn
    assert isinstance(experts, MoE) and experts.shared is not None and not experts.fused_shared
    assert (experts.intermediate_size, experts.shared.intermediate_size) == (96, 96)
