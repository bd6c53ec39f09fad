"""Small checkpoints written as the published ones are: their quantization configs (lists of modules that name every
layer, for as many layers as there are here), names, packing, scales, shards and index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.model_loader.checkpoint import INDEX_NAME, SINGLE_NAME

from .quantized_checkpoints import FORMS, Form, Tensors, save_quantized

NUM_LAYERS = 3
"""Of every tiny model that is used here."""
NUM_SHARDS = 3
_TEXT = "model.layers.{layer}."


def each_layer(*templates: str) -> list[str]:
    return [template.format(layer=i) for template in templates for i in range(NUM_LAYERS)]


@dataclass(frozen=True)
class Published:
    """A row of models and formats. `config` is quantization_config, `modelopt` hf_quant_config.json; modules whose
    names contain one of `keep` are in 16 bits. `changes`: keys of config.json. `cache_scales`: there are some for a
    cache in FP8. `drafts`: as many layers behind the last one are in the file. `rename`: of tensors, in the end."""

    tiny: str
    form: str
    config: Mapping[str, Any] = field(default_factory=dict)
    modelopt: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    cache_scales: bool = False
    drafts: int = 0
    rename: Callable[[str], str] = str
    beside: tuple[str, ...] = ()
    """Names of tensors that nobody reads."""
    wrap: bool = False  # the text's config is inside
    experts_apart: bool = False  # as of `save_quantized`


_FP4_VALUES = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def _modelopt_fp4(ignore: list[str]) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"input_activations": _FP4_VALUES, "weights": _FP4_VALUES, "targets": ["Linear"]}},
        "ignore": ignore,
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_method": "modelopt",
    }


def _modelopt_file(algorithm: str, excluded: list[str], **more: Any) -> dict[str, Any]:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", **more, "exclude_modules": excluded}
    return {"producer": {"name": "modelopt", "version": "0.43.0"}, "quantization": inner}


_FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_KIMI_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
_KIMI = {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1}
_KIMI_16_BITS = ("self_attn", "shared_experts", "layers.0.mlp")
_K27_IGNORE = [
    "language_model.lm_head",
    "language_model.model.embed_tokens",
    "language_model.model.layers.0*",
    *[f"language_model.model.layers.{i}.{part}*" for i in (1, 2) for part in ("mlp.shared_experts", "self_attn")],
    "mm_projector*",
    "vision_tower*",
]
_MINIMAX_IGNORE = ["lm_head", *each_layer(_TEXT + "block_sparse_moe.gate", _TEXT + "self_attn*")]
_MINIMAX = {
    "attn_type_list": [1] * NUM_LAYERS,
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "use_mtp": True,
    "mtp_transformer_layers": 1,
    "num_mtp_modules": 3,
    "shared_intermediate_size": 0,
}
_HY3_IGNORE = ["lm_head", "model.layers.*.mlp.router*", "model.layers.*.self_attn*", "model.layers.3*"]
_HY3 = {
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "route_norm": True,
    "qk_norm": True,
    "enable_lm_head_fp32": True,
}
_GLM47_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}
_STATIC_FP8 = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "kv_cache_scheme": "FP8",
    "producer": {"name": "modelopt", "version": "0.31.0"},
}

_IN_16_BITS = ("",)

PUBLISHED: dict[str, Published] = {
    "GLM-4.7-Flash": Published(
        "glm4_moe_lite", "fp8_block", keep=_IN_16_BITS, changes={"num_nextn_predict_layers": 1}, drafts=1
    ),
    "Hy3": Published("hy_v3", "fp8_block", keep=_IN_16_BITS, changes=_HY3, drafts=1),
    "Hy3-FP8": Published("hy_v3_wide", "fp8_block", _FP8_BLOCKS, changes=_HY3, drafts=1),
    "Hy3-NVFP4": Published(
        "hy_v3_wide",
        "modelopt_nvfp4",
        _modelopt_fp4(_HY3_IGNORE),
        _modelopt_file("NVFP4", _HY3_IGNORE, group_size=16),
        keep=("self_attn",),
        changes=_HY3,
        cache_scales=True,
    ),
    "Hy3-NVFP4 of llm-compressor": Published(
        "hy_v3_wide",
        "compressed_nvfp4",
        {**FORMS["compressed_nvfp4"].config, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.router.*"]},
        keep=("self_attn",),
        changes=_HY3,
        drafts=1,
    ),
    "Mistral-Small-4-NVFP4 of llm-compressor": Published(
        "mistral4_wide",
        "compressed_nvfp4",
        {**FORMS["compressed_nvfp4"].config, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]},
        keep=("self_attn",),
        experts_apart=True,
    ),
    "Mixtral-8x22B-v0.1": Published("mixtral", "fp8_block", keep=_IN_16_BITS),
    "GLM-4.7-FP8": Published(
        "glm4_moe_wide", "compressed_fp8_channel", _GLM47_FP8, changes={"num_nextn_predict_layers": 1}, drafts=1
    ),
    "DeepSeek-R1": Published("deepseek_v3_wide", "fp8_block", _FP8_BLOCKS, drafts=1),
    "Kimi-K2-Instruct": Published("deepseek_v3_wide", "fp8_block", _FP8_BLOCKS, changes=_KIMI),
    "Kimi-K2-Thinking": Published(
        "deepseek_v3_wide", "compressed_int4_g32", _KIMI_INT4, keep=_KIMI_16_BITS, changes=_KIMI
    ),
    "Kimi-K2-Thinking-NVFP4": Published(
        "deepseek_v3_wide",
        "modelopt_nvfp4",
        _modelopt_fp4(["lm_head", "model.layers.*.self_attn*"]),
        keep=("self_attn",),
        changes=_KIMI,
        cache_scales=True,
    ),
    "Kimi-K2.7-Code-NVFP4": Published(
        "deepseek_v3_wide",
        "modelopt_nvfp4",
        _modelopt_fp4(_K27_IGNORE),
        _modelopt_file("NVFP4", _K27_IGNORE, group_size=16),
        keep=_KIMI_16_BITS,
        changes=_KIMI | {"model_type": "deepseek_v3"},
        cache_scales=True,
        rename=lambda name: f"language_model.{name}",
        beside=("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"),
        wrap=True,
    ),
    "MiniMax-M2.7": Published(
        "minimax_m2_wide",
        "fp8_block",
        _FP8_BLOCKS
        | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        changes=_MINIMAX,
    ),
    "MiniMax-M2.7-NVFP4": Published(
        "minimax_m2_wide",
        "modelopt_nvfp4",
        _modelopt_fp4(_MINIMAX_IGNORE),
        _modelopt_file("NVFP4", _MINIMAX_IGNORE, group_size=16),
        keep=("self_attn",),
        changes=_MINIMAX,
        cache_scales=True,
    ),
    "Qwen3-30B-A3B-FP8": Published(
        "qwen3_moe_wide",
        "fp8_block",
        _FP8_BLOCKS
        | {
            "modules_to_not_convert": [
                "lm_head",
                *each_layer(*(_TEXT + part for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm"))),
            ]
        },
    ),
    "Qwen3-235B-A22B-NVFP4": Published(
        "qwen3_moe_wide",
        "modelopt_nvfp4",
        modelopt=_modelopt_file("NVFP4", ["lm_head", *each_layer(_TEXT + "mlp.gate")], group_size=16),
        cache_scales=True,
    ),
    "Qwen3-32B-FP8-Static-PerTensor": Published(
        "qwen3_wide", "modelopt_fp8", _STATIC_FP8, _modelopt_file("FP8", ["lm_head"]), cache_scales=True
    ),
    "Llama-3.1-70B-Instruct-FP8": Published(
        "llama_wide", "modelopt_fp8", modelopt=_modelopt_file("FP8", ["lm_head"]), cache_scales=True
    ),
}


def write_published(row: Published, folder: Path) -> None:
    """`folder`/quantized, and what it stands for in `folder`/reference."""
    form = Form(FORMS[row.form].write, row.config, row.modelopt)
    save_quantized(row.tiny, form, folder, keep=row.keep, experts_apart=row.experts_apart)
    tensors = load_file(folder / "quantized" / SINGLE_NAME)
    if row.cache_scales:
        for name, value in (("k", 0.5), ("v", 0.25)):
            tensors |= {
                f"{prefix}self_attn.{name}_proj.{name}_scale": torch.tensor(value) for prefix in each_layer(_TEXT)
            }
    for i in range(row.drafts):
        prefix = _TEXT.format(layer=NUM_LAYERS + i)
        copied = {name: tensor for name, tensor in tensors.items() if name.startswith(_TEXT.format(layer=2))}
        tensors |= {name.replace(_TEXT.format(layer=2), prefix): tensor.clone() for name, tensor in copied.items()}
        tensors |= {f"{prefix}{name}.weight": torch.ones(4) for name in ("eh_proj", "enorm", "shared_head.norm")}
    tensors = {row.rename(name): tensor for name, tensor in tensors.items()}
    tensors |= {name: torch.ones(4, 4) for name in row.beside}
    _change_config(folder, row)
    (folder / "quantized" / SINGLE_NAME).unlink()
    write_shards(tensors, folder / "quantized")


def _change_config(folder: Path, row: Published) -> None:
    for kind in ("reference", "quantized"):
        path = folder / kind / "config.json"
        config = json.loads(path.read_text())
        # transformers has no `kimi_k2`; the form is DeepSeek's.
        changes = {key: value for key, value in row.changes.items() if kind == "quantized" or key != "model_type"}
        config |= changes
        if kind == "quantized" and row.wrap:
            quantization = config.pop("quantization_config")
            config = {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "model_type": "kimi_k25",
                "text_config": config,
                "vision_config": {"vt_hidden_size": 64, "vt_num_attention_heads": 4},
                "quantization_config": quantization,
            }
        path.write_text(json.dumps(config))


def write_shards(tensors: Tensors, folder: Path) -> None:
    """In turns over several files, with their index."""
    weight_map: dict[str, str] = {}
    for i in range(NUM_SHARDS):
        name = f"model-{i + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        part = dict(list(tensors.items())[i::NUM_SHARDS])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))


def read_shards(folder: Path) -> Tensors:
    return {key: value for path in sorted(folder.glob("model-*.safetensors")) for key, value in load_file(path).items()}
