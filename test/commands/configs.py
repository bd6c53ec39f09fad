"""Configs of checkpoints that people serve and that no config file here is of, written from the classes' defaults and
from what model cards state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from srt.kernels import published

Config = dict[str, Any]
_FP8_BLOCKS: Config = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _published(name: str) -> Config:
    return dict(json.loads(published.config_files()[name].read_text()))


def _laguna() -> Config:
    """33.4B parameters: 48 heads in every fourth layer, 64 in those with a window."""
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(40)]
    yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "dtype": "bfloat16",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [64 if kind == "sliding_attention" else 48 for kind in kinds],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": kinds,
        "sliding_window": 512,
        "gating": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", *["sparse"] * 39],
        "rope_parameters": {
            "full_attention": {**yarn, "beta_fast": 64.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    }


def _mimo() -> Config:
    """MiMo-V2.5's text in FP8, of MiMo-V2-Flash's sizes, with q, k and v as one tensor."""
    fused = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}
    kept = [f"model.layers.{i}.self_attn.o_proj" for i in range(48)]
    return {
        **_published("MiMo-V2-Flash"),
        **fused,
        "attention_projection_layout": "fused_qkv",
        "max_position_embeddings": 1048576,
        "quantization_config": {**_FP8_BLOCKS, "ignored_layers": kept},
    }


def _mimo_pro() -> Config:
    """MiMo-V2.5-Pro with experts in NVFP4 and attention in MXFP8: 70 layers, of which 10 see everything."""
    layers = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(1, 70)}
    for i in range(70):
        names = ("self_attn.qkv_proj", "self_attn.o_proj", *(() if i else ("mlp",)))
        layers |= {f"model.layers.{i}.{name}": {"quant_algo": "MXFP8"} for name in names}
    return {
        **_mimo(),
        "num_hidden_layers": 70,
        "hidden_size": 6144,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "swa_num_attention_heads": 128,
        "hybrid_layer_pattern": [int(i % 7 > 0) for i in range(70)],
        "moe_layer_freq": [int(i > 0) for i in range(70)],
        "n_routed_experts": 384,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        },
    }


_MIMO_VISION: Config = {
    "depth": 28,
    "hidden_size": 1280,
    "intermediate_size": 4608,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "in_chans": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "silu",
    "use_sink": True,
    "visual_token_window_size": 64,
    "fullatt_block_indexes": [0, 9, 18, 27],
    "vit_window_attn_types": [-1, *([0] * 4 + [1] * 4 + [-1]) * 3],
}


def _mimo26(base: Config) -> Config:
    """MiMo-V2.6: the layers of V2.5 with experts in MXFP4, and rotary parameters also in the newer form."""
    form = {**_FP8_BLOCKS, "store_dtype": "mxfp4", "mxfp4_block_size": 32}
    kept = [f"model.layers.{i}.self_attn.o_proj" for i in range(base["num_hidden_layers"])]
    rotary = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.334}
    return {
        **base,
        "rope_theta": 10000000,
        "rope_parameters": rotary,
        "layernorm_epsilon": 1e-6,
        "moe_router_dtype": "bfloat16",
        "num_nextn_predict_layers": 3,
        "image_token_id": 151655,
        "vision_config": {**_MIMO_VISION, "out_hidden_size": base["hidden_size"]},
        "audio_config": {"audio_channels": 20},
        "processor_config": {"image_min_pixels": 8192},
        "quantization_config": {**form, "ignored_layers": [*kept, "model.decoder.self_attn.o_proj"]},
    }


def _glm53() -> Config:
    """GLM-5.3: names and shapes of GLM-5.2, whose experts alone are in NVFP4."""
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    kept = ["lm_head", "model.embed_tokens", "*self_attn*", "*shared_experts*", "*mlp.gate", "*eh_proj"]
    dense = [f"model.layers.{i}.mlp*" for i in range(3)]
    return {
        **_published("GLM-5.2"),
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}},
            "ignore": [*kept, *dense],
            "producer": {"name": "modelopt"},
        },
    }


def mimo_draft(hidden: int, heads: int, layers: list[int], mask_token: int) -> Config:
    """The DFlash draft beside MiMo-V2.6 (`dflash/`)."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "hidden_size": hidden,
        "intermediate_size": 16384,
        "num_hidden_layers": 5,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "v_head_dim": 128,
        "partial_rotary_factor": 0.5,
        "block_size": 8,
        "dflash_config": {
            "target_layer_ids": layers,
            "mask_token_id": mask_token,
            "num_anchors": 4096,
            "block_size": 8,
            "loss_decay_gamma": 7.0,
            "use_swa": True,
            "swa_window_size": 1024,
            "backbone_rotary_base": 5000000,
            "attention_value_scale": 0.612,
            "attention_sink_bias": True,
        },
        "num_target_layers": layers[-1] + 1,
        "vocab_size": 152064,
        "max_position_embeddings": 262144,
        "rope_theta": 10000,
        "sliding_window": 1024,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def laguna_draft() -> Config:
    """The DFlash draft of Laguna-XS-2.1, as wide as its file says; which layers it reads is not known here."""
    return {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "gating": "per-head",
        "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "max_position_embeddings": 262144,
        "vocab_size": 100352,
        "draft_vocab_size": 100352,
        "dflash_config": {
            "mask_token_id": 12, "target_layer_ids": [1, 10, 19, 29, 38], "block_size": 16, "causal": True,
        },
    }  # fmt: skip


def dflash2_draft(target: str, layers: list[int], rows: int, mask_token: int) -> Config:
    """A DFlash 2 draft of z-lab's form for a model whose text has the hidden size and the vocabulary."""
    text = _published(target)
    text = text.get("text_config", text)
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 3 * text["hidden_size"],
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": text["num_hidden_layers"],
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "rms_norm_eps": 1e-06,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "is_causal": False,
        "dflash_config": {
            "target_layer_ids": layers,
            "mask_token_id": mask_token,
            "block_size": rows,
            "conv_kernel_size": 4,
            "conv_group_size": 64,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }


_LING_FP8: Config = {**_FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "gate", "b_proj"]}
_LING_INT4: Config = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*attention.*", "re:.*mlp.gate$", "re:.*shared_experts.*", "re:.*layers.[01].mlp.*"],
}


def _puzzle() -> Config:
    """Nemotron-Labs-3-Puzzle with routed experts in NVFP4, and Mamba-2 and shared experts in FP8."""
    config, layers = _published("NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16"), {}
    formats = {
        "mamba": {"mixer.in_proj": "FP8", "mixer.out_proj": "FP8"},
        "moe": {"mixer.experts": "NVFP4", "mixer.shared_experts": "FP8"},
        "attention": {},
    }
    for i, block in enumerate(config["block_configs"]):
        for module, algorithm in formats[block["block_type"]].items():
            layers[f"model.layers.{i}.{module}"] = {"quant_algo": algorithm} | (
                {"group_size": 16} if algorithm == "NVFP4" else {}
            )
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {**config, "quantization_config": quantization}


def _in_16_bits(name: str) -> Config:
    return {key: value for key, value in _published(name).items() if key != "quantization_config"}


def _kimi_linear(quantization: Config) -> Config:
    return {**_published("Kimi-Linear-48B-A3B-Instruct"), "quantization_config": quantization}


def _llama4(name: str, quantization: Config) -> Config:
    return {**_published(f"Llama-4-{name}-Instruct"), "quantization_config": quantization}


def _coder(group: int) -> Config:
    """Qwen3-Coder-30B-A3B in AWQ."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    awq["modules_to_not_convert"] = ["mlp.gate"]
    return {**_published("Qwen3-30B-A3B"), "quantization_config": awq, "max_position_embeddings": 262144}


# What stays in 16 bits is that of llm-compressor's recipes for the family; ModelOpt's exports of it are read as those.
_LLAMA4_KEPT = ("lm_head", "self_attn", "router", "vision_model", "multi_modal_projector")
_LLAMA4_FP4: Config = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": [f"*{name}*" for name in _LLAMA4_KEPT],
}
_LLAMA4_FP8: Config = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": [f"re:.*{name}.*" for name in _LLAMA4_KEPT],
}
_KIMI_KEPT = ["lm_head", "block_sparse_moe.gate", "self_attn"]
_FLASH_NEXT_KEPT = [
    "lm_head",
    "mlp.gate",
    "shared_expert_gate",
    "linear_attn.in_proj_ba",
    "indexer",
    "hyper_connection",
]
"""Assumed: those that exports of the family leave alone."""
CONFIGS: dict[str, Config] = {
    "Laguna-XS.2": _laguna(),
    "MiMo-V2.5": _mimo(),
    "MiMo-V2.5-Pro-NVFP4-MXFP8": _mimo_pro(),
    "GLM-5.3-NVFP4": _glm53(),
    "Gemma-4-31B": _in_16_bits("Gemma-4-31B-IT-NVFP4"),
    "Qwen3.8-Flash-Next-FP8": {
        **_published("qwen38_flash_next_nvfp4"),
        "quantization_config": {**_FP8_BLOCKS, "modules_to_not_convert": _FLASH_NEXT_KEPT},
    },
    "MiMo-V2.6-Flash-RL": _mimo26(_mimo()),
    "MiMo-V2.6-Pro-RL": {**_mimo26(_mimo_pro()), "attention_value_scale": 0.612},
    "Ling-3.0-flash-FP8": {**_published("Ling-3.0-flash"), "quantization_config": _LING_FP8},
    "Ling-3.0-flash-MXFP4": {
        **_published("Ling-3.0-flash"),
        "quantization_config": {**_LING_FP8, "routed_experts_quant_method": "mxfp4", "scale_fmt": "ue8m0"},
    },
    "Ling-3.0-flash-int4": {**_published("Ling-3.0-flash"), "quantization_config": _LING_INT4},
    "Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4": _puzzle(),
    "Kimi-Linear-48B-A3B-FP8": _kimi_linear({**_FP8_BLOCKS, "modules_to_not_convert": _KIMI_KEPT[:2]}),
    "Kimi-Linear-48B-A3B-NVFP4": _kimi_linear(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"*{name}*" for name in _KIMI_KEPT]}
    ),
    "Llama-4-Scout-NVFP4": _llama4("Scout-17B-16E", _LLAMA4_FP4),
    "Llama-4-Maverick-FP8": _llama4("Maverick-17B-128E", _LLAMA4_FP8),
    "Qwen3-Coder-30B-A3B-AWQ": _coder(128),
    "Qwen3-Coder-30B-A3B-AWQ-g64": _coder(64),
}


def checkpoint(name: str, folder: Path) -> Path:
    """A directory with a config of these, or of the published ones, and no weights."""
    if name not in CONFIGS:
        return published.any_checkpoint(name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
