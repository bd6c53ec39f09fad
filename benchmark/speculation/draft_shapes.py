"""Models and drafts of published shapes, written as config.json files: what `bench_blocks.py` measures.

Sizes are those of the published config.json files; where fewer layers or experts are taken than published, the case's
text says so. DFlash's and DSpark's sizes for these models are those of drafts that are published for models of this
width, or of the formats' descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]
_FP8: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True, slots=True)
class Case:
    """A target with its draft. `target` and `draft` make their configs, of few layers or of all that are measured;
    `flags`: of the drafts, without the path."""

    what: str
    target: Callable[[bool], Config]
    flags: tuple[str, ...]
    accept_length: float
    draft: Config = field(default_factory=dict)

    def write(self, folder: Path, few_layers: bool) -> list[str]:
        """Writes the directories. Returns the server's flags."""
        flags = ["--model-path", str(_save(folder / "target", self.target(few_layers))), *self.flags]
        if self.draft:
            path = _save(folder / "draft", self.draft)
            flags += ["--speculative-draft-model-path", str(path), "--speculative-draft-load-format", "dummy"]
        return flags


def _save(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen3_5_27b(few_layers: bool) -> Config:
    layers = 4 if few_layers else 64
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    wide = [f"model.layers.{i}.linear_attn.in_proj_{part}" for i in range(layers) for part in "ab"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": layers, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320, "attn_output_gate": True,
        "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 262144, "dtype": "bfloat16",
        "layer_types": kinds, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "quantization_config": {**_FP8, "modules_to_not_convert": ["lm_head", "model.embed_tokens", *wide]},
    }  # fmt: skip


DFLASH_27B: Config = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000000, "max_position_embeddings": 262144, "vocab_size": 248320,
    "tie_word_embeddings": False, "dtype": "bfloat16", "block_size": 16,
    "dflash_config": {"mask_token_id": 248070},
}  # fmt: skip


def deepseek_v4_flash(few_layers: bool, dspark: bool) -> Config:
    ratios = [4, 128] if few_layers else [0, 0, 4, 128, 4, 128, 4, 128]
    layers, stages = len(ratios), (2 if few_layers else 3) if dspark else 1
    draft: Config = {"num_nextn_predict_layers": stages, "compress_ratios": [*ratios, *[0] * stages]}
    if dspark:
        draft |= {
            "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_markov_rank": 256,
            "dspark_target_layer_ids": list(range(layers - stages, layers)),
        }  # fmt: skip
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
        "num_hidden_layers": layers, "num_hash_layers": 1 if few_layers else 3, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
        "o_groups": 8, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "sliding_window": 128,
        "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "compress_rope_theta": 160000, "expert_dtype": "fp4", "tie_word_embeddings": False, "vocab_size": 129280,
        "max_position_embeddings": 1048576, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        },
        "quantization_config": {**_FP8, "fmt": "e4m3", "scale_fmt": "ue8m0"},
        **draft,
    }  # fmt: skip


def glm_5(few_layers: bool) -> Config:
    layers = 4 if few_layers else 6
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
        "intermediate_size": 12288, "num_hidden_layers": layers, "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "moe_intermediate_size": 2048,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "tie_word_embeddings": False,
        "vocab_size": 154880, "max_position_embeddings": 202752, "dtype": "bfloat16", "num_nextn_predict_layers": 1,
        "eos_token_id": [154820], "pad_token_id": 154820,
        "quantization_config": {**_FP8, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]},
    }  # fmt: skip


_DEPTH_7 = ("--speculative-num-draft-tokens", "8")
CASES: dict[str, Case] = {
    "qwen3.5-27b-dflash": Case(
        "all 64 layers in FP8 blocks, DFlash of five layers in bf16, blocks of 16, seven guesses",
        qwen3_5_27b, ("--speculative-algorithm", "DFLASH", *_DEPTH_7), 4.0, DFLASH_27B,
    ),
    "v4-flash-dspark": Case(
        "8 of 43 layers with all 256 experts in MXFP4, DSpark of three stages, blocks of five guesses",
        lambda few: deepseek_v4_flash(few, True),
        ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "5"), 3.0,
    ),
    "v4-flash-mtp": Case(
        "8 of 43 layers with all 256 experts in MXFP4, its MTP layer, two guesses",
        lambda few: deepseek_v4_flash(few, False),
        ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"), 2.2,
    ),
    "glm-5-mtp": Case(
        "6 of 78 layers with 64 of 256 experts in FP8 blocks, its MTP layer with an indexer, three guesses",
        glm_5, ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"), 2.6,
    ),
}  # fmt: skip
