"""Gemma 3 and 4 beyond parity: text halves of multimodal checkpoints, published configs and forms, caches that layers
share."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.dense import QuantizedLinear
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.cache_spec import FULL, Window
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.server_args import ServerArgs

from .harness import (
    SIZES,
    TINY,
    NativePlan,
    TinyRunner,
    blocks_of,
    hf_logits,
    plan_for,
    random_tokens,
    randomize,
    save_tiny,
)
from .quantized_checkpoints import FORMS, Tensors, save_quantized

TOKENS = random_tokens(30, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
WINDOWS_THEN_FULL = [*["sliding_attention"] * 5, "full_attention"]
GEMMA4_31B: dict[str, Any] = {  # text_config, as published
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": WINDOWS_THEN_FULL * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
GEMMA4_26B_A4B = GEMMA4_31B | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": WINDOWS_THEN_FULL * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
GEMMA4_E2B = GEMMA4_31B | {
    "attention_k_eq_v": False,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_double_wide_mlp": True,
}


def described(text: dict[str, Any], folder: Path, **outer: Any) -> NativePlan:
    wrapper = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (folder / "config.json").write_text(json.dumps(wrapper | {"dtype": "bfloat16"} | outer))
    return NativePlan(ModelConfig.from_server_args(ServerArgs(model_path=str(folder))), context_len=16)


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt, a second piece over its cache, then token by token."""
    pieces = (runner.extend({2: TOKENS[:18]})[0], runner.extend({2: TOKENS[18:27]})[0])
    return torch.cat((*pieces, *(runner.decode({2: token}) for token in TOKENS[27:])))


# --- published configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "published"), [(GEMMA4_31B, 30.7e9), (GEMMA4_26B_A4B, 25.2e9), (GEMMA4_E2B, 4.6e9)])
def test_sizes_are_those_published(text: dict[str, Any], published: float, tmp_path: Path) -> None:
    """Without the encoders; the small model's table of inputs by layer is half of it."""
    plan = described(text, tmp_path)
    built = CausalLM(plan, device="meta")
    allocated = sum(p.tensor.nbytes for p in built.params.values())
    assert plan.weight_bytes() == allocated
    assert allocated / 2 == pytest.approx(published, rel=0.01)


def test_a_dense_model(tmp_path: Path) -> None:
    layers = described(GEMMA4_31B, tmp_path).description.layers
    window, full = layers[0].mixer, layers[5].mixer
    assert (window.num_kv_heads, window.head_dim, window.window, window.values.from_keys) == (16, 256, 1024, False)
    assert (full.num_kv_heads, full.head_dim, full.window, full.values.from_keys) == (4, 512, 0, True)
    assert window.softmax_scale == full.softmax_scale == 1.0
    assert (full.rope.kind, full.rope.rot_dim) == ("proportional", 512) and window.rope.rot_dim == 256
    assert isinstance(layers[0].ffn, Dense) and layers[0].ffn.intermediate_size == 21504


def test_experts_beside_an_mlp(tmp_path: Path) -> None:
    description = described(GEMMA4_26B_A4B, tmp_path).description
    ffn = description.layers[0].ffn
    assert isinstance(ffn, MoE) and ffn.router == Router(8, exact_logits=True) and ffn.shared == Shared(2112)
    assert (ffn.num_experts, ffn.intermediate_size, ffn.branches, ffn.fused_shared) == (128, 704, True, False)
    assert description.shared_apart == "it has norms of its own"


def test_layers_that_share_a_cache_cost_none(tmp_path: Path) -> None:
    description = described(GEMMA4_E2B, tmp_path).description
    groups = {group.lifetime: group for group in cache_groups(description, ParallelConfig("bfloat16", "bfloat16"))}
    assert {lifetime: group.num_caches for lifetime, group in groups.items()} == {Window(512): 12, FULL: 3}
    sources = [layer.mixer.cache.source(i) for i, layer in enumerate(description.layers)]
    assert sources[14:20] == [14, 13, 13, 13, 13, 14]
    assert [layer.ffn.intermediate_size for layer in description.layers[14:16]] == [6144, 12288]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"num_kv_shared_layers": 58}, "none is of the kind full_attention, whose cache layer 5 could share"),
        ({"per_layer_config": {"60": {"head_dim": 64}}}, "'per_layer_config' has '60'.* for 60 layers"),
        ({"per_layer_config": {"6": {"sliding_window": 64}}}, "'per_layer_config' with sliding_window is not"),
    ],
)
def test_values_that_are_not_computed(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = described(GEMMA4_31B | change, tmp_path).description


# --- the text half of a multimodal checkpoint -------------------------------------------------------------------------


def multimodal(name: str, folder: Path) -> torch.Tensor:
    """Saved as transformers writes it, with a small image encoder. Logits of TOKENS."""
    import transformers

    text = getattr(transformers, TINY[name][0])(**copy.deepcopy(SIZES | TINY[name][1]))
    encoder = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name.startswith("gemma3"):
        vision = transformers.SiglipVisionConfig(**encoder, image_size=28, patch_size=14)
        config = transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=255
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        more = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 16}
        vision = transformers.Gemma4VisionConfig(**encoder, **more)
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, image_token_id=255)
        model = transformers.Gemma4ForConditionalGeneration(config)
    torch.manual_seed(0)
    model = model.float().eval()
    randomize(model, zero_centred_norms=name.startswith("gemma3"))
    model.save_pretrained(folder)
    return hf_logits(model, TOKENS)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_moe", "gemma4_small"])
def test_the_text_half_of_a_multimodal_checkpoint(name: str, tmp_path: Path) -> None:
    want = multimodal(name, tmp_path)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path))), want, **TOLERANCE)


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def test_gemma_3_in_the_other_order_of_names(tmp_path: Path) -> None:
    """Newer transformers keep the decoder in `model.language_model.`."""
    want = multimodal("gemma3", tmp_path)

    def move(tensors: Tensors) -> None:
        for key in list(tensors):
            inner = key.replace("language_model.model.", "language_model.")
            tensors[f"model.{inner}"] = tensors.pop(key)

    rewrite(tmp_path, move)
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path))), want, **TOLERANCE)


def test_gemma_3_4b_leaves_most_keys_out(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    plan = described(text, tmp_path, architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3")
    layers = plan.description.layers
    full, window = layers[5].mixer, layers[0].mixer
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.softmax_scale) == (8, 4, 256, 1 / 16)
    assert (full.rope.kind, full.rope.theta, window.rope.kind, window.rope.theta) == ("linear", 1e6, "default", 1e4)
    built = CausalLM(plan, device="meta")
    allocated = sum(p.tensor.nbytes for p in built.params.values())
    assert plan.weight_bytes() == allocated and allocated / 2 == pytest.approx(3.88e9, rel=0.01)


# --- NVFP4, as NVIDIA publishes it ------------------------------------------------------------------------------------


def nvfp4(name: str, folder: Path, keep: tuple[str, ...]) -> None:
    """ModelOpt's form in config.json: everything but `keep` (of each layer) and the encoder, a cache in FP8."""
    num_layers = TINY[name][1]["num_hidden_layers"]
    layers = [f"model.language_model.layers.{i}.{part}*" for i in range(num_layers) for part in keep]
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    config = {
        "config_groups": {"group_0": {"input_activations": values, "weights": values, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.embed_vision*", *layers, "model.vision_tower*"],
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_method": "modelopt",
    }
    form = replace(FORMS["modelopt_nvfp4"], config=config, modelopt={})
    save_quantized(name, form, folder, keep=keep, experts_apart="moe" in name)
    path = folder / "quantized" / "config.json"
    text = json.loads(path.read_text())
    quantization = text.pop("quantization_config")
    wrapper = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    path.write_text(json.dumps(wrapper | {"quantization_config": quantization, "vision_config": {"hidden_size": 64}}))

    def move(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("model.", "model.language_model.", 1)] = tensors.pop(key)
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(4, 4)
        tensors["model.embed_vision.embedding_projection.weight"] = torch.ones(4, 4)
        for i in range(num_layers):
            tensors[f"model.language_model.layers.{i}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
            tensors[f"model.language_model.layers.{i}.self_attn.v_proj.v_scale"] = torch.tensor(0.25)

    rewrite(folder / "quantized", move)


NVFP4 = [("gemma4", ("self_attn",)), ("gemma4_moe", ("mlp", "router", "self_attn"))]


@pytest.mark.parametrize(("name", "keep"), NVFP4)
def test_nvfp4_as_published(name: str, keep: tuple[str, ...], tmp_path: Path) -> None:
    import transformers

    nvfp4(name, tmp_path, keep)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "reference", dtype=torch.float32)
    want = hf_logits(reference, TOKENS)
    plan = plan_for(tmp_path / "quantized", kv_cache_dtype="float32")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    mixer, ffn = blocks_of(runner.model.layers[0])
    assert not isinstance(mixer.qkv.apply, QuantizedLinear)
    if name == "gemma4":
        assert isinstance(ffn.gate_up.apply, QuantizedLinear)
    else:
        assert ffn.moe.experts.w13.scheme.name == "nvfp4" and ffn.moe.shared is not None
    rounded = TinyRunner(plan_for(tmp_path / "quantized"))
    caches = rounded.model.caches
    assert {cache.k.dtype for cache in caches} == {torch.float8_e4m3fn}, "the checkpoint was made for it"
    assert {(cache.k_scale, cache.v_scale) for cache in caches} == {(0.5, 0.25)}
    check_rounded(rounded, runner, (0.5, 0.25))


def check_rounded(rounded: TinyRunner, exact: TinyRunner, scales: tuple[float, float]) -> None:
    """The first layer's cache is the exact one in fp8, divided by its scales. Products of q and k are not scaled down
    here, so that rounded logits say little."""
    assert steps(rounded).isfinite().all()
    for name, scale in zip(("k", "v"), scales, strict=True):
        got, want = (runner.model.caches[0][name].float() for runner in (rounded, exact))
        torch.testing.assert_close(got * scale, want, rtol=0.0626, atol=scale * 2**-9)


def _extra(tensors: Tensors) -> None:
    tensors["model.language_model.layers.1.router.surprise"] = torch.ones(4)


def _missing(tensors: Tensors) -> None:
    del tensors["model.language_model.layers.2.layer_scalar"]


def _missing_expert(tensors: Tensors) -> None:
    del tensors["model.language_model.layers.1.experts.3.up_proj.weight_scale_2"]


def _misshaped(tensors: Tensors) -> None:
    tensors["model.language_model.layers.1.router.per_expert_scale"] = torch.ones(5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_extra, r"weights that the model does not have: model\.language_model\.layers\.1\.router\.surprise"),
        (_missing, r"lacks weights of the model: model\.language_model\.layers\.2\.layer_scalar"),
        (_missing_expert, r"lacks weights of the model: .*layers\.1\.experts\.3\.up_proj\.weight_scale_2"),
        (_misshaped, r"router\.per_expert_scale has shape \[5\], but config.json calls for \[4\]"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    name, keep = NVFP4[1]
    nvfp4(name, tmp_path, keep)
    rewrite(tmp_path / "quantized", change)
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path / "quantized"))


# --- caches that layers share -----------------------------------------------------------------------------------------


def test_sharing_layers_read_the_rounded_cache_of_their_source(tmp_path: Path) -> None:
    """In fp8, with scales in the checkpoint: those of the layer that owns the cache."""
    save_tiny("gemma4_small", tmp_path)
    exact = TinyRunner(plan_for(tmp_path))
    steps(exact)

    def add_scales(tensors: Tensors) -> None:
        for i in range(4):
            tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor(0.5 + i)
            tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor(0.25)

    rewrite(tmp_path, add_scales)
    runner = TinyRunner(plan_for(tmp_path, kv_cache_dtype="fp8_e4m3"))
    assert [(cache.layer_id, cache.k_scale) for cache in runner.model.caches] == [(i, 0.5 + i) for i in range(4)]
    sharing, source = (blocks_of(runner.model.layers[i])[0].attention.cache for i in (5, 2))
    assert sharing is source
    check_rounded(runner, exact, (0.5, 0.25))
