"""Inkling beyond parity: chunks that end anywhere, keys of published configs, padded vocabularies, the published layout
in NVFP4, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization import reference
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.media import describe_media
from sglang.srt.towers.inkling.spec import InklingTower

from .harness import INKLING, TINY, TinyRunner, hf_logits, plan_for, random_tokens, reference_of, save_tiny

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published" / "Inkling-Small"
CLOSE = {"rtol": 0.0, "atol": 1e-4}
FIRST = 1
"""The first layer with experts, which published checkpoints leave in 16 bits."""


def changed(folder: Path, **keys: Any) -> None:
    """Changes keys of the text in config.json; None: there is none."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | keys
    config["text_config"] = {key: value for key, value in text.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def test_chunks_may_end_anywhere(tmp_path: Path) -> None:
    """Convolutions reach over the ends of several chunks of a token each, windows and tile configs end within
    chunks."""
    model, tokens = save_tiny("inkling", tmp_path), random_tokens(46, seed=1)
    want, runner = hf_logits(model, tokens), TinyRunner(plan_for(tmp_path))
    for first in (1, 2, 3, 6):
        ends = [first, first + 1, first + 2, first + 5, 13 + first, 24 + first, len(tokens)]
        pieces = [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        got = torch.cat([runner.extend({2: piece})[0] for piece in pieces])
        torch.testing.assert_close(got, want, **CLOSE)
        runner.end(2)


def test_published_configs(tmp_path: Path) -> None:
    """They have lists and numbers of layers, the size of experts under another key, and no defaults."""
    model, tokens = save_tiny("inkling", tmp_path), random_tokens(41, seed=1)
    changed(tmp_path, layer_types=None, mlp_layer_types=None, local_layer_ids=[0, 2], dense_mlp_idx=1)
    changed(tmp_path, intermediate_size=32, dense_intermediate_size=96, moe_intermediate_size=None)
    changed(tmp_path, conv_kernel_size=None, sconv_kernel_size=4, max_position_embeddings=None, model_max_length=256)
    changed(tmp_path, use_sconv=True, use_embed_norm=True, norm_after_topk=True, gate_activation="sigmoid")
    plan = plan_for(tmp_path)
    mixers = [layer.mixer for layer in plan.description.layers]
    assert all(isinstance(mixer, GQA) for mixer in mixers)
    assert [mixer.softmax.relative_bias.extent for mixer in mixers] == [12, 20, 12, 20]
    assert [mixer.attn_temperature is not None for mixer in mixers] == [False, True] * 2
    assert [type(layer.ffn) for layer in plan.description.layers] == [Dense, MoE, MoE, MoE]
    torch.testing.assert_close(TinyRunner(plan).extend({1: tokens})[0], hf_logits(model, tokens), **CLOSE)


@pytest.mark.parametrize("rows", [INKLING["unpadded_vocab_size"], 256])
def test_heads_with_padding_and_without(rows: int, tmp_path: Path) -> None:
    model, tokens = save_tiny("inkling", tmp_path), random_tokens(20, seed=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert len(tensors["model.llm.unembed.weight"]) == len(tensors["model.llm.embed.weight"]) == 256
    tensors["model.llm.unembed.weight"] = tensors["model.llm.unembed.weight"][:rows].clone()
    save_file(tensors, file, {"format": "pt"})
    plan = plan_for(tmp_path)
    got = TinyRunner(plan).extend({1: tokens})[0]
    assert got.shape[1] == plan.model.vocab_size == INKLING["unpadded_vocab_size"]
    torch.testing.assert_close(got, hf_logits(model, tokens), **CLOSE)


def save_nvfp4(folder: Path) -> Path:
    """As published: products of all experts are one tensor each, with numbers of other names; the first layer's stay in
    16 bits, and so does all that is no expert. Returns what it stands for."""
    whole, quantized = folder / "reference", folder / "quantized"
    save_tiny("inkling", whole)
    tensors, stored = load_file(whole / "model.safetensors"), {}
    for key, tensor in list(tensors.items()):
        stored[key] = tensor
        if ".mlp.experts." not in key or f"layers.{FIRST}." in key:
            continue
        made = [reference.quantize(expert, SCHEMES["nvfp4"]) for expert in tensor]
        tensors[key] = torch.stack([reference.dequantize(one, SCHEMES["nvfp4"]) for one in made]).contiguous()
        stored[key] = torch.stack([one.data for one in made])
        stored[f"{key}.scale"] = torch.stack([one.scale for one in made])
        stored[f"{key}.scale2"] = torch.stack([one.global_scale.reshape(()) for one in made])
        stored[f"{key}.input_amax"] = torch.tensor([448.0 * 6.0 * 0.05])
        stored[f"{key}.original_shape"] = torch.tensor(tensor.shape)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    (quantized / "config.json").write_text((whole / "config.json").read_text())
    excluded = [f"model.llm.layers.{FIRST}.mlp.experts", "model.llm.layers.0.mlp", "model.llm.unembed"]
    rules = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    (quantized / "hf_quant_config.json").write_text(json.dumps({"quantization": rules}))
    return whole


def test_the_published_layout_in_nvfp4(tmp_path: Path) -> None:
    model, tokens = reference_of(save_nvfp4(tmp_path)), random_tokens(30, seed=1)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    got = torch.cat((runner.extend({2: tokens[:20]})[0], *(runner.decode({2: token}) for token in tokens[20:])))
    torch.testing.assert_close(got, hf_logits(model, tokens), **CLOSE)
    quants = [block.experts.quant for layer in runner.model.layers[1:] for block in [layer.blocks[1][1].block]]
    assert [quant and quant.scheme for quant in quants] == [None, "nvfp4", "nvfp4"]
    inputs = runner.model.layers[2].blocks[1][1].block.experts.w13.input_scale
    assert inputs is None or torch.allclose(inputs, torch.full_like(inputs, 0.05))
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink = False is not supported"),
        ({"gate_activation": "softmax"}, "gate_activation = 'softmax' is not supported"),
        ({"layer_types": ["hybrid", "linear"] * 2}, "layer_types linear are not described here yet"),
        ({"conv_kernel_size": 1}, "'sconv_kernel_size' must be at least 2; got 1"),
        ({"logits_mup_width_multiplier": 0.0}, "must be more than 0; got 0.0"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("inkling", tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path).description.require_served()


def test_caches_in_four_bits_are_refused(tmp_path: Path) -> None:
    save_tiny("inkling", tmp_path)
    layer = plan_for(tmp_path).description.layers[0]
    with pytest.raises(UserError, match="relative biases"):
        layer.caches(ParallelConfig("bfloat16", "fp4_e2m1"))


def test_states_of_the_convolutions(tmp_path: Path) -> None:
    """Three tokens of k and v together, and of what each block makes, in every layer."""
    save_tiny("inkling", tmp_path)
    hidden = TINY["inkling"][1].get("hidden_size", 64)
    for layer, kv_heads in zip(plan_for(tmp_path).description.layers, (4, 2, 4, 2), strict=True):
        caches = {cache.name: cache for cache in layer.caches(ParallelConfig("bfloat16", "bfloat16"))}
        assert [tensor.shape for tensor in caches["kv_rows"].tensors] == [(3, 2 * kv_heads * 32)]
        assert [tensor.shape for tensor in caches["block_rows"].tensors] == [(3, hidden)] * 2


def test_the_encoder_of_a_published_model() -> None:
    """Patches of 40 pixels in four layers, the last of which folds both frames. A config without a vision_config reads
    text alone."""
    config = json.loads((PUBLISHED / "config.json").read_text())
    assert describe_media(config) is None
    media = describe_media(config | {"vision_config": {"n_layers": 4, "use_vision_norm": True}})
    assert media is not None and (media.image_token, media.video_token) == (200054, None)
    tower = media.tower
    assert isinstance(tower, InklingTower) and tower.patch_shape == (3, 2, 40, 40)
    assert [(fold.frames, fold.side, fold.inputs, fold.out) for fold in tower.folds] == [
        (1, 5, 75, 128),
        (1, 2, 512, 320),
        (1, 4, 5120, 4800),
        (2, 1, 9600, 4096),
    ]
    assert tower.shared_by(8).num_weights() == tower.num_weights(), "every rank has all of it"
    assert tower.num_tokens((1, 3, 5)) == 15
