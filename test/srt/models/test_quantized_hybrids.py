"""Quantized hybrids as they are published: tensor names, packing, scales and keys of the configs, each against
transformers with the weights that the checkpoint stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.dense import QuantizedLinear
from sglang.srt.model_loader.loader import load_model

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny
from .quantized_checkpoints import (
    Tensors,
    Write,
    gptq,
    gptq_int8,
    nvfp4_compressed,
    nvfp4_modelopt,
    plain,
    signed_int4,
    static,
    unpacked_mxfp4,
)
from .ranks_alike import assert_ranks_alike

TOKENS = random_tokens(19, seed=1)
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def weight_only(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, stands_for = nvfp4_modelopt(weight)
    del tensors["input_scale"]
    return tensors, stands_for


def of_one_largest(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Gate and up of an expert with one global scale: otherwise block scales are rounded again."""
    weight = weight.clone()
    weight[0, 0] = 1.0
    assert weight.abs().max() == 1.0
    return nvfp4_modelopt(weight)


def of_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FP8 with scales of rows in bfloat16, which divide."""
    scale = (weight.abs().amax(-1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


WRITERS: Mapping[str, Write] = {
    "NVFP4 of one scale": of_one_largest,
    "FP8": static(plain("fp8_tensor", "weight_scale")),
    "W4A16_NVFP4": weight_only,
    "NVFP4": nvfp4_modelopt,
    "blocks": plain("fp8_block", "weight_scale_inv"),
    "GPTQ": gptq(128),
    "FP8 of rows": of_rows,
    "packed NVFP4": nvfp4_compressed,
    "W4AFP8": signed_int4(128),
    "MXFP4 of MiMo": unpacked_mxfp4("weight_scale"),
    "MXFP4 of Ling": unpacked_mxfp4("weight_scale_inv"),
    "GPTQ of 8 bits": gptq_int8(128),
    "GPTQ in groups of 32": gptq(32),
}
RECURRENT = r".*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
ATTENTION = r".*\.self_attn\.[qkvo]_proj"
EXPERTS = r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj"
SHARED = r".*\.mlp\.shared_expert\.(gate|up|down)_proj"


@dataclass(frozen=True)
class Published:
    """`ways`: which modules are stored how, the first match counts. `config(modules)` is the quantization_config, or
    with `own_file` the content of hf_quant_config.json, given how each module is stored. `wrapped`: the text half of a
    multimodal checkpoint. `residual`: modules with a scale that their scheme does not read. `more`: keys of the config
    beside the tiny model's."""

    model: str
    ways: tuple[tuple[str, str], ...]
    config: Callable[[dict[str, str]], dict[str, Any]]
    own_file: bool = False
    wrapped: bool = False
    residual: str = ""
    listed_as: tuple[str, str] = ("", "")
    more: Mapping[str, Any] = field(default_factory=dict)


def mixed(modules: dict[str, str]) -> dict[str, Any]:
    """ModelOpt since 0.44: the table of modules decides, the groups beside it say it again."""
    layers = {
        name: {"quant_algo": way} | ({"group_size": 16} if "NVFP4" in way else {}) for name, way in modules.items()
    }
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    groups = {
        "group_0": {"input_activations": eight, "weights": eight, "targets": []},
        "group_1": {"weights": eight | {"num_bits": 4, "group_size": 16}, "targets": []},
    }
    return {
        "config_groups": groups,
        "quantized_layers": layers,
        "ignore": ["mtp*", "mtp.layers.0*"],
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_method": "modelopt",
    }


def mixed_in_own_file(modules: dict[str, str]) -> dict[str, Any]:
    inner = mixed(modules)
    excluded = ["backbone.embeddings", "backbone.layers.0.mixer.conv1d", "backbone.layers.2.mixer.k_proj", "mtp*"]
    inner = {key: inner[key] for key in ("quant_algo", "quantized_layers")} | {"exclude_modules": excluded}
    return {"producer": {"name": "modelopt", "version": "0.44.0rc5"}, "quantization": inner}


def nvfp4_of_experts(modules: dict[str, str]) -> dict[str, Any]:
    """Qwen3.5-122B-A10B-NVFP4."""
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    ignored = ["self_attn*", "linear_attn*", "mlp.shared_expert*", "mlp.shared_expert_gate", "mlp.gate"]
    layers = [f"model.language_model.layers.{i}.{part}" for i in range(4) for part in ignored]
    return {
        "config_groups": {"group_0": {"input_activations": four, "weights": four, "targets": ["Linear"]}},
        "ignore": ["lm_head", *layers, "model.visual*", "mtp.layers.0*", "mtp*"],
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt"},
        "quant_method": "modelopt",
    }


def nvfp4_of_nemotron(modules: dict[str, str]) -> dict[str, Any]:
    """Nemotron 3 Nano: everything but attention, some Mamba-2 layers, convolutions and the head."""
    excluded = ["lm_head", *(f"backbone.layers.2.mixer.{part}_proj" for part in "qkvo")]
    excluded += [f"backbone.layers.0.mixer.{part}" for part in ("in_proj", "out_proj", "conv1d")]
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": excluded}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}


def blocks(modules: dict[str, str]) -> dict[str, Any]:
    kept = ["lm_head", "model.embed_tokens", "mlp.gate", "mlp.shared_expert_gate"]
    kept += [f"linear_attn.{part}" for part in ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba")]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }


def mixed_groups(modules: dict[str, str]) -> dict[str, Any]:
    """Unsloth's Qwen3.6-27B-NVFP4: modules of the last MLPs are in both groups, and the first one counts."""
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    targets = ["re:.*self_attn\\.(q|k|v|o)_proj$", "re:.*linear_attn\\.(in_proj_qkv|in_proj_z|out_proj)$", "lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": [*targets, "re:.*layers\\.3\\.mlp\\.(gate|up|down)_proj$"],
                "weights": eight,
                "input_activations": eight | {"strategy": "token", "dynamic": True},
            },
            "group_1": {
                "format": "nvfp4-pack-quantized",
                "targets": ["re:.*mlp\\.(gate|up|down)_proj$"],
                "weights": four,
                "input_activations": four | {"dynamic": "local"},
            },
        },
        "ignore": ["re:.*visual.*", "re:mtp.*"],
    }


def gptq_of_experts(modules: dict[str, str]) -> dict[str, Any]:
    """GPTQModel's list of exceptions: patterns for the beginning of a name."""
    kept = ("attn", "shared_expert", "mtp", "visual")
    dynamic: dict[str, Any] = {"lm_head": {}, "model.language_model.embed_tokens": {}}
    return {
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "true_sequential": True,
        "quant_method": "gptq",
        "dynamic": dynamic | {f"-:.*{part}.*": {} for part in kept},
    }


def auto_round_mixed(modules: dict[str, str]) -> dict[str, Any]:
    """Intel's int4-mixed: attention in 8 bits by a pattern, others by name, the routers in 16."""
    eight = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
    extra: dict[str, Any] = {r".*self_attn\.[qkv]_proj": eight}
    named = (
        name for name, way in modules.items() if way == "GPTQ of 8 bits" and not name.endswith(("q_proj", "k_proj"))
    )
    extra |= dict.fromkeys(named, eight) | {"model.language_model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"}}
    extra[r".*shared_expert\."] = {"group_size": 32}
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "extra_config": extra,
    }


def beside_blocks(**keys: Any) -> Callable[[dict[str, str]], dict[str, Any]]:
    """Experts of another kind beside blocks of FP8."""
    return lambda modules: blocks(modules) | keys


NEMOTRON_EXPERTS = r"backbone\.layers\.\d+\.mixer\.(shared_experts|experts\.\d+)\.(up|down)_proj"
NEMOTRON_MLP = r"backbone\.layers\.4\.mixer\.(up|down)_proj"
PUBLISHED: Mapping[str, Published] = {
    "Qwen3.6-27B-NVFP4": Published(
        "qwen3_5",
        ((RECURRENT, "FP8"), (ATTENTION, "FP8"), (r".*\.mlp\..*_proj|lm_head", "W4A16_NVFP4")),
        mixed,
        wrapped=True,
    ),
    "Qwen3.6-27B-NVFP4 of Unsloth": Published(
        "qwen3_5",
        (
            (rf"{RECURRENT}|{ATTENTION}|.*\.layers\.3\.mlp\..*_proj|lm_head", "FP8 of rows"),
            (r".*\.mlp\..*_proj", "packed NVFP4"),
        ),
        mixed_groups,
        wrapped=True,
    ),
    "Qwen3.8-27B-NVFP4": Published(  # activations of the head in four bits
        "qwen3_5", ((f"{RECURRENT}|{ATTENTION}", "FP8"), (r".*\.mlp\..*_proj|lm_head", "NVFP4")), mixed, wrapped=True
    ),
    "a head in FP8 of one scale": Published(
        "qwen3_5", ((rf"{RECURRENT}|lm_head", "FP8"), (r".*\.mlp\..*_proj", "NVFP4")), mixed, wrapped=True
    ),
    "Qwen3.6-35B-A3B-NVFP4": Published(
        "qwen3_5_moe",
        ((RECURRENT, "FP8"), (ATTENTION, "FP8"), (f"{EXPERTS}|{SHARED}|lm_head", "W4A16_NVFP4")),
        mixed,
        wrapped=True,
        residual=f"{EXPERTS}|{SHARED}|lm_head",
        listed_as=(r"(\.mlp\.experts)\..*", r"\1"),
    ),
    "Nemotron-3.5-Lightning": Published(
        "nemotron_h",
        ((r".*\.mixer\.(in|out)_proj", "FP8"), (f"{NEMOTRON_EXPERTS}|lm_head", "W4A16_NVFP4")),
        mixed_in_own_file,
        own_file=True,
    ),
    "Qwen3.8-2.4T-A95B-NVFP4": Published(  # with the gates of recurrent layers
        "qwen3_5_moe",
        ((r".*\.linear_attn\.(in_proj_\w+|out_proj)", "FP8"), (ATTENTION, "FP8"), (EXPERTS, "NVFP4")),
        mixed,
        wrapped=True,
    ),
    "Qwen3.5-122B-A10B-NVFP4": Published("qwen3_5_moe", ((EXPERTS, "NVFP4"),), nvfp4_of_experts, wrapped=True),
    "Nemotron-3-Nano-NVFP4": Published(
        "nemotron_h",
        ((f"{NEMOTRON_EXPERTS}|{NEMOTRON_MLP}|backbone.layers.3.mixer.(in|out)_proj", "NVFP4"),),
        nvfp4_of_nemotron,
        own_file=True,
    ),
    "Qwen3.5-35B-A3B-FP8": Published(
        "qwen3_5_moe_wide", ((f"{RECURRENT}|{ATTENTION}|{EXPERTS}|{SHARED}", "blocks"),), blocks, wrapped=True
    ),
    "W4AFP8": Published(
        "qwen3_5_moe_wide",
        ((EXPERTS, "W4AFP8"), (f"{RECURRENT}|{ATTENTION}|{SHARED}", "blocks")),
        beside_blocks(quant_method="w4afp8", group_size=128),
        wrapped=True,
    ),
    "MiMo-V2.6": Published(
        "qwen3_5_moe_wide",
        ((EXPERTS, "MXFP4 of MiMo"), (f"{RECURRENT}|{ATTENTION}|{SHARED}", "blocks")),
        beside_blocks(store_dtype="mxfp4", mxfp4_block_size=32),
        wrapped=True,
    ),
    "Ling-3.0-flash": Published(
        "qwen3_5_moe_wide",
        ((EXPERTS, "MXFP4 of Ling"), (f"{RECURRENT}|{ATTENTION}|{SHARED}", "blocks")),
        beside_blocks(routed_experts_quant_method="mxfp4", scale_fmt="ue8m0"),
        wrapped=True,
    ),
    "Qwen3.6-35B-A3B-int4-mixed": Published(
        "qwen3_5_moe_wide",
        ((EXPERTS, "GPTQ"), (SHARED, "GPTQ in groups of 32"), (f"{ATTENTION}|{RECURRENT}|lm_head", "GPTQ of 8 bits")),
        auto_round_mixed,
        wrapped=True,
    ),
    "Qwen3.5-35B-A3B-GPTQ-Int4": Published("qwen3_5_moe_wide", ((EXPERTS, "GPTQ"),), gptq_of_experts, wrapped=True),
    "Qwen3-Next-80B-A3B-FP8": Published(
        "qwen3_next_wide",
        ((rf".*\.linear_attn\.(in_proj_qkvz|out_proj)|{ATTENTION}|{EXPERTS}|{SHARED}", "blocks"),),
        blocks,
    ),
}


def publish(made: Published, folder: Path, device: str = "cpu") -> Path:
    """Writes the checkpoint to `folder`/quantized; returns where the same model in fp32 is. `device` quantizes."""
    save_tiny(made.model, folder / "reference", **made.more)
    tensors = load_file(folder / "reference" / "model.safetensors")
    stored: Tensors = {}
    modules: dict[str, str] = {}
    for key, tensor in list(tensors.items()):
        module, _, leaf = key.rpartition(".")
        way = next((way for pattern, way in made.ways if re.fullmatch(pattern, module)), None)
        module = module.replace("model.", "model.language_model.", 1) if made.wrapped else module
        if leaf != "weight" or way is None:
            stored[f"{module}.{leaf}" if module else leaf] = tensor
            continue
        written, stands_for = WRITERS[way](tensor.to(device))
        written, tensors[key] = {part: value.cpu() for part, value in written.items()}, stands_for.cpu()
        if made.residual and re.fullmatch(made.residual, key.rpartition(".")[0]):
            written["input_scale"] = torch.tensor(0.5)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in written.items()}
        modules[re.sub(*made.listed_as, module)] = way
    assert set(modules.values()) == {way for _, way in made.ways}, "a pattern matches nothing"
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    _write(folder / "quantized", stored, json.loads((folder / "reference" / "config.json").read_text()), made, modules)
    return folder / "reference"


def _write(folder: Path, stored: Tensors, config: dict[str, Any], made: Published, modules: dict[str, str]) -> None:
    folder.mkdir()
    if made.wrapped:
        stored |= {"model.visual.patch_embed.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
        architecture = config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
        config = {
            "architectures": [architecture],
            "model_type": config["model_type"].removesuffix("_text"),
            "text_config": config,
            "vision_config": {"hidden_size": 64, "num_heads": 4},
        }
    quantization = made.config(modules)
    if made.own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    else:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")


def steps(runner: TinyRunner) -> torch.Tensor:
    """Logits of TOKENS: a prompt in two chunks, then token by token."""
    extended = [*runner.extend({2: TOKENS[:9]}), *runner.extend({2: TOKENS[9:16]})]
    return torch.cat((*extended, *(runner.decode({2: token}) for token in TOKENS[16:])))


def wanted(reference: Path) -> torch.Tensor:
    return hf_logits(transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32), TOKENS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_form_computes_what_it_stands_for(name: str, tmp_path: Path) -> None:
    reference = publish(PUBLISHED[name], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner, want = TinyRunner(plan), wanted(reference)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    held = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert held == plan.weight_bytes(), "the plan counts other bytes than are allocated"
    head = runner.model.head
    in_table = any(re.fullmatch(pattern, "lm_head") for pattern, _ in PUBLISHED[name].ways)
    assert head is not None and isinstance(head.product, QuantizedLinear) == in_table


def test_two_ranks_share_heads_experts_and_the_quantized_vocabulary(tmp_path: Path) -> None:
    publish(replace(PUBLISHED["Qwen3.6-35B-A3B-NVFP4"], model="qwen3_5_moe_wide"), tmp_path)
    assert_ranks_alike(2, steps, TOLERANCE, tmp_path)


# --- the KV cache, and what is refused --------------------------------------------------------------------------------


def test_the_cache_that_only_modelopts_own_file_speaks_of(tmp_path: Path) -> None:
    """Qwen3.6-35B-A3B-NVFP4: no word of it in config.json, and no scales."""
    publish(PUBLISHED["Qwen3.6-35B-A3B-NVFP4"], tmp_path)
    assert plan_for(tmp_path / "quantized").kv_cache_dtype == "float32"
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    plan = plan_for(tmp_path / "quantized")
    assert plan.kv_cache_dtype == "fp8_e4m3" and plan.model.quantization is not None
    assert "config.json quantization_config" in plan.model.quantization.source
    assert plan_for(tmp_path / "quantized", kv_cache_dtype="bf16").kv_cache_dtype == "bfloat16"


def _lacks(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _stored_as(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensors[name].to(dtype))


def _cut(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:, 1:].contiguous())


def _more(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.ones(()))


LAYER = "model.language_model.layers.1."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen3.6-27B-NVFP4", _lacks("lm_head.weight_scale_2"), r"lacks weights of the model: lm_head.weight_scale_2"),
        (
            "Qwen3.6-27B-NVFP4",
            _stored_as("lm_head.weight", torch.bfloat16),
            r"lm_head.weight is stored as BF16, but .* calls for U8",
        ),
        (
            "Qwen3.6-27B-NVFP4",
            _stored_as(f"{LAYER}linear_attn.in_proj_z.weight", torch.bfloat16),
            r"layers.1.linear_attn.in_proj_z.weight is stored as BF16, but .* calls for F8_E4M3",
        ),
        (
            "Qwen3.6-27B-NVFP4",
            _lacks(f"{LAYER}linear_attn.in_proj_qkv.input_scale"),
            r"lacks weights of the model: .*layers.1.linear_attn.in_proj_qkv.input_scale",
        ),
        (
            "Qwen3.6-27B-NVFP4",
            _more(f"{LAYER}linear_attn.in_proj_a.weight_scale"),
            r"has weights that the model does not have: .*layers.1.linear_attn.in_proj_a.weight_scale",
        ),
        (
            "Qwen3.6-35B-A3B-NVFP4",
            _cut(f"{LAYER}mlp.experts.3.down_proj.weight_scale"),
            r"experts.3.down_proj.weight_scale has shape \[64, 1\], but config.json calls for \[64, 2\]",
        ),
        (
            "Nemotron-3.5-Lightning",
            _lacks("backbone.layers.1.mixer.experts.7.up_proj.weight_scale_2"),
            r"lacks weights of the model: backbone.layers.1.mixer.experts.7.up_proj.weight_scale_2",
        ),
        (
            "Qwen3.5-35B-A3B-FP8",
            _cut("model.language_model.layers.0.linear_attn.out_proj.weight_scale_inv"),
            r"out_proj.weight_scale_inv has shape \[1, 3\], but config.json calls for \[1, 4\]",
        ),
    ],
)
def test_wrong_tensors_are_named(name: str, change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    publish(PUBLISHED[name], tmp_path)
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(plan_for(tmp_path / "quantized"))
