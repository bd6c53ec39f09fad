"""Runs our models without a server: tiny transformers models saved to disk, loaded by our loader, stepped by hand."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from tiny_models import made_once

from sglang.srt.configs.merge_methods import ALL_TO_ALL
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import CPU, ArchTraits
from sglang.srt.kernels.op import Op
from sglang.srt.kernels.tile_configs import TileConfigs
from sglang.srt.layers.attention.sites import AttentionSites, latent_sites, sparse_sites
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.step_rows import DecodeRows, ExtendRows, TokenSlots
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.model_loader.loader import filled_model
from sglang.srt.models.causal_lm import DecoderLayer
from sglang.srt.plan import served_model
from sglang.srt.plan.attention_sites import attention_sites
from sglang.srt.plan.cache_scales import CacheScales
from sglang.srt.plan.caches import cache_groups, row_tables
from sglang.srt.plan.draft_plan import DraftPlan, with_draft_layers
from sglang.srt.plan.kv_spec import kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.served_model import describe_served
from sglang.srt.plan.weights import rank_weight_bytes
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sglang.srt.plan.transformers_backend.facts import ClassFacts, ClassRequest


def _facts_found_here(request: ClassRequest) -> ClassFacts:
    """Facts of a class of transformers: a process for each tiny config would take seconds."""
    from sglang.srt.models.transformers_backend.trial import facts_of

    return facts_of(request)


served_model.facts_of = _facts_found_here

VOCAB = 250
"""Token ids below this are valid in every tiny model."""
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 160,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 12,
    "floor_scale": 7,
    "attn_scale": 0.4,
    "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},
}

SMOLLM3 = {"num_hidden_layers": 4, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
COHERE2 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "logit_scale": 1.5,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MUSE = {
    "num_hidden_layers": 8,
    "sliding_window": 12,
    "final_logit_softcapping": 4.0,
    "output_multiplier": 0.7,
    "qk_scale_factor": 1.5,
    "post_norm_eps": 1e-3,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
STEP = {
    "sliding_window": 12,
    "attention_other_setting": {"num_attention_heads": 6},
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0,
}
INKLING = {
    "num_hidden_layers": 4,
    "unpadded_vocab_size": VOCAB + 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "sliding_window_size": 12,
    "local_layer_ids": [0, 2],
    "d_rel": 8,
    "rel_extent": 20,
    "log_scaling_n_floor": 9,
    "log_scaling_alpha": 0.4,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 2.0,
}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 12, "use_sliding_window": True}

# Dimensions that GPU kernels take.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 128}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_interleave": True,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
"""As many heads as leave no scores equal at zero."""
LATENT_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
}
HY_V4 = {
    **{key: value for key, value in LATENT.items() if key not in ("rope_interleave", "first_k_dense_replace")},
    **INDEXER,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "hc_mult": 4,
    "hc_magnitude": 1.5,
    "hc_eps": 1e-3,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

GROWING = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8, "max_position_embeddings": 256,
    "llama_4_scaling_beta": 0.4,
}  # fmt: skip
"""Queries grow every eight tokens."""
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
GEMMA4 = {
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
}
GEMMA4_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
HYBRID_WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
KIMI_LINEAR = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
DSA = "deepseek_sparse_attention"
POOLED_LATENT = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "layer_types": [*["linear_attention"] * 2, DSA, "linear_attention", DSA],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_n_heads": 16,  # as many as leave no scores equal at zero
    "index_head_dim": 16,
    "index_topk": 12,
    "index_kpool": 4,
    "swiglu_limit": 0.5,
    "hc_sinkhorn_iters": 3,  # a CPU is slow at small things
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""GLM-5.3-Flash: three of the runs of 4 tokens are selected."""
COMPRESSED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "q_lora_rank": 24,
    "o_lora_rank": 12,
    "o_groups": 2,
    "sliding_window": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "partial_rotary_factor": 0.25,
    "swiglu_limit": 0.5,
    "compress_rope_theta": 160000.0,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rate_hca": 16,
    "num_hash_layers": 2,
    "hc_sinkhorn_iters": 3,  # a CPU is slow at small things
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""DeepSeek-V4; runs of 16 tokens where published ones have 128."""
NEMOTRON = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "time_step_min": 1e-9,  # the reference takes it for a limit in prompts, and not after them
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
NEMOTRON_PUZZLE = NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "moe"],
    "ssm_state_size": 24,
    "moe_latent_size": 24,
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 3},
        {"block_type": "attention"},
        {"block_type": "moe", "moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_routed_experts": 6},
        {"block_type": "moe", "moe_intermediate_size": 32, "num_experts_per_tok": 5},
    ],
}
NEMOTRON_WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 128,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "intermediate_size": 256,
}
WRAPPED: dict[str, dict[str, Any]] = {
    "Step3p7Config": {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "max_position_embeddings": 4,
    },
    "Glm5NextConfig": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 24},
    "InklingConfig": {"patch_size": 4, "num_hidden_layers": 4},
    "MuseGlimmerConfig": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "max_position_embeddings": 4,
    },
}
"""Classes whose text config is inside another one, and the encoder beside it, which nothing reads."""
POOLED = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "linear_attention", "qwen_sparse_attention", "qwen_sparse_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "hc_count": 3,
    "hc_lowrank": 12,
    "indexer_n_heads": 16,  # as many as leave no scores equal at zero
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [2],
    "ple_embed_dim": 48,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 90,
    "make_ngram_vocab_size_divisible_by": 32,
    "split_ngram_parts": 4,
    "eos_token_id": 7,
}
"""Qwen3.8-Flash-Next: four of the blocks of 4 tokens are selected."""
ZERO_CENTRED = frozenset(
    {
        "muse_glimmer",
        "muse_glimmer_wide",
        "step3p7",
        "step3p7_wide",
        "gemma3",
        "gemma3_capped",
        "qwen3_next",
        "qwen3_next_wide",
        "qwen3_5",
        "qwen3_5_wide",
        "qwen3_5_moe",
    }
    | {"qwen3_5_moe_wide", "minimax_m3", "minimax_m3_wide", "qwen4_exp", "qwen4_exp_small", "qwen4_exp_wide"}
)
BLOCKS = {
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "eos_token_id": 2,
}
"""MiniMax-M3: a layer that attends to everything, and two that attend to three blocks of four tokens."""
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 48}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}

# name -> (transformers config class, what differs from SIZES)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3_tied_bias": ("Qwen3Config", {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 251}),
    "qwen3_windows": ("Qwen3Config", WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "qwen3_windows_only": ("Qwen3Config", WINDOWS | {"layer_types": ["sliding_attention"] * 4}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        EXPERTS | {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "cohere2": ("Cohere2Config", COHERE2),  # of no family here: transformers' own code computes it
    "inkling": ("InklingConfig", INKLING),
    "inkling_wide": (
        "InklingConfig",
        INKLING
        | WIDE
        | {"moe_intermediate_size": 128, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4}
        | {"swa_head_dim": 128, "d_rel": 16, "num_key_value_heads": 2},
    ),
    "smollm3": ("SmolLM3Config", SMOLLM3),
    "smollm3_windows": (
        "SmolLM3Config",
        WINDOWS | SMOLLM3 | {"no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False},
    ),
    "llama4": ("Llama4TextConfig", LLAMA4),
    "llama4_wide": (
        "Llama4TextConfig",
        WIDE
        | LLAMA4
        | {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "intermediate_size_mlp": 512}
        | {"attention_chunk_size": 24, "intermediate_size": 256},
    ),
    "qwen3_wide": ("Qwen3Config", WIDE),
    "qwen3_windows_wide": (
        "Qwen3Config",
        WIDE | WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3_moe_wide": ("Qwen3MoeConfig", WIDE | EXPERTS | {"moe_intermediate_size": 128}),
    "glm4_moe_wide": (
        "Glm4MoeConfig",
        WIDE
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "glm4_wide": ("Glm4Config", WIDE | {"attention_bias": True, "pad_token_id": 2, "eos_token_id": [2]}),
    "minimax_m2_wide": (
        "MiniMaxM2Config",
        WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "eos_token_id": 2},
    ),
    "llama_wide": ("LlamaConfig", WIDE | {"head_dim": 64}),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        LATENT
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": YARN | {"mscale": 0.7},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1, "rope_parameters": YARN},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        LATENT
        | {"qk_nope_head_dim": 24, "v_head_dim": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        LATENT | INDEXER | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1, "rope_parameters": YARN},
    ),
    "deepseek_v32_selects_all": (
        "DeepseekV32Config",
        LATENT | INDEXER | {"index_topk": 300, "n_group": 1, "topk_group": 1},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        LATENT
        | INDEXER
        | {"qk_nope_head_dim": 24, "v_head_dim": 32, "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
        | {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm_moe_dsa_wide": (
        "GlmMoeDsaConfig",
        LATENT
        | LATENT_WIDE
        | {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 16, "qk_nope_head_dim": 192, "v_head_dim": 256}
        | {"indexer_types": ["full", "shared", "full"], "num_nextn_predict_layers": 1},
    ),
    "hy_v4": ("HYV4Config", HY_V4),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_windows": ("MistralConfig", {"sliding_window": 12}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {"head_dim": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "head_dim": 16},
    ),
    "glm4": (
        "Glm4Config",
        {"attention_bias": True, "pad_token_id": 2, "eos_token_id": [2]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        ROUTED
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
        | {"attention_bias": True, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "step3p7": (
        "Step3p7Config",
        STEP
        | {"num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_routed_experts": 8}
        | {"rope_theta": [5e6, 1e4, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5]}
        | {"swiglu_limits": [None, 0.0, 0.0, 7.0], "swiglu_limits_shared": [0.0, 0.0, 16.0, 7.0]},
    ),
    "step3p7_wide": (
        "Step3p7Config",
        WIDE
        | STEP
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "share_expert_dim": 128}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 4, "moe_intermediate_size": 128}
        | {"num_key_value_heads": 4, "attention_other_setting": {"num_attention_heads": 16}}
        | {"rope_theta": [5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0]}
        | {"swiglu_limits": [0.0, 0.0, 7.0], "swiglu_limits_shared": [0.0, 0.0, 16.0]},
    ),
    "muse_glimmer": ("MuseGlimmerConfig", MUSE),
    "muse_glimmer_wide": ("MuseGlimmerConfig", WIDE | MUSE | {"num_hidden_layers": 4}),
    "hy_v3": (
        "HYV3Config",
        EXPERTS
        | {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "router_scaling_factor": 2.826}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "enable_moe_fp32_combine": True},
    ),
    "hy_v3_wide": (
        "HYV3Config",
        WIDE
        | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 128}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "router_scaling_factor": 2.826},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "eos_token_id": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "minimax_m3": ("MiniMaxM3VLTextConfig", BLOCKS),
    "minimax_m3_wide": (
        "MiniMaxM3VLTextConfig",
        WIDE
        | BLOCKS
        | {"intermediate_size": 128, "dense_intermediate_size": 256, "shared_intermediate_size": 128}
        | {"rotary_dim": 64, "index_head_dim": 128, "index_block_size": 16},
    ),
    "deepseek_v3_wide": (
        "DeepseekV3Config",
        LATENT | LATENT_WIDE | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1, "rope_parameters": YARN},
    ),
    "qwen3_next": ("Qwen3NextConfig", HYBRID | SHARED_EXPERT | {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        HYBRID | {"rope_parameters": HYBRID["rope_parameters"] | SECTIONS, "linear_value_head_dim": 16},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        HYBRID | SHARED_EXPERT | {"rope_parameters": HYBRID["rope_parameters"] | SECTIONS},
    ),
    "qwen3_next_wide": ("Qwen3NextConfig", HYBRID | HYBRID_WIDE | {"decoder_sparse_step": 1}),
    "qwen3_5_wide": (
        "Qwen3_5TextConfig",
        HYBRID
        | {key: value for key, value in HYBRID_WIDE.items() if "expert" not in key and "moe" not in key}
        | {"intermediate_size": 256}
        | {"rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [6, 5, 5]}},
    ),
    "qwen3_5_moe_wide": (
        "Qwen3_5MoeTextConfig",
        HYBRID | HYBRID_WIDE | {"rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [6, 5, 5]}},
    ),
    "gpt_oss_wide": (
        "GptOssConfig",
        WIDE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 64}
        | {"rope_parameters": GPT_OSS_ROPE},
    ),
    "mimo_v2_wide": (
        "MiMoV2FlashConfig",
        WIDE
        | {"head_dim": 192, "v_head_dim": 128, "sliding_window": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "n_group": 1, "topk_group": 1}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3},
    ),
    "mimo_v2": (
        "MiMoV2FlashConfig",
        {"num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 16, "sliding_window": 12, "num_key_value_heads": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": GPT_OSS_ROPE},
    ),
    "kimi_linear": ("KimiLinearConfig", KIMI_LINEAR),
    "kimi_linear_wide": (
        "KimiLinearConfig",
        KIMI_LINEAR
        | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "kv_lora_rank": 128}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128}
        | {"linear_head_dim": 128, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm5_next": ("Glm5NextConfig", POOLED_LATENT),
    "glm5_next_small": (
        "Glm5NextConfig",
        POOLED_LATENT
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", DSA], "mlp_layer_types": ["sparse", "dense"]}
        | {"index_topk": 8, "hc_mult": 2, "hc_sinkhorn_iters": 2, "linear_lower_bound": -2.0},
    ),
    "glm5_next_wide": (
        "Glm5NextConfig",
        POOLED_LATENT
        | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", DSA, DSA], "moe_intermediate_size": 128}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "q_lora_rank": 128, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "v_head_dim": 128, "linear_head_dim": 128, "linear_num_heads": 2}
        | {"index_n_heads": 32, "index_head_dim": 128, "hc_sinkhorn_iters": 20},
    ),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "nemotron_h_wide": ("NemotronHConfig", NEMOTRON | NEMOTRON_WIDE),
    "nemotron_h_latent": (
        "NemotronHConfig",
        NEMOTRON | {"moe_latent_size": 24, "use_bias": True, "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h_puzzle": ("NemotronHConfig", NEMOTRON_PUZZLE),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 4, "sliding_window": 12, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": GEMMA_ROPE, "sliding_attention": {"rope_type": "default"}}},
    ),
    "gemma3_capped": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "sliding_window": 12, "final_logit_softcapping": 5.0, "tie_word_embeddings": False},
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA4 | {"layer_types": GEMMA4_LAYERS}),
    "gemma4_moe": (
        "Gemma4TextConfig",
        GEMMA4
        | {"layer_types": GEMMA4_LAYERS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
    ),
    "gemma4_small": (
        "Gemma4TextConfig",
        GEMMA4
        | {"num_hidden_layers": 6, "layer_types": [*GEMMA4_LAYERS[:3], *GEMMA4_LAYERS[:3]], "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 16, "use_double_wide_mlp": True, "attention_k_eq_v": False},
    ),
    "gemma4_moe_wide": (
        "Gemma4TextConfig",
        WIDE
        | GEMMA4
        | {"layer_types": GEMMA4_LAYERS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 128, "head_dim": 64, "global_head_dim": 128},
    ),
    "gemma4_small_wide": (
        "Gemma4TextConfig",
        WIDE
        | GEMMA4
        | {"num_hidden_layers": 6, "layer_types": [*GEMMA4_LAYERS[:3], *GEMMA4_LAYERS[:3]], "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 64, "use_double_wide_mlp": True, "attention_k_eq_v": False}
        | {"head_dim": 64, "global_head_dim": 128},
    ),
    "laguna": (
        "LagunaConfig",
        {"num_hidden_layers": 4, "num_attention_heads_per_layer": [4, 6, 6, 4], "sliding_window": 12, **EXPERTS}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
        | {"shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5},
    ),
    "laguna_wide": (
        "LagunaConfig",
        WIDE
        | {"num_hidden_layers": 2, "num_attention_heads_per_layer": [4, 8], "sliding_window": 12, **EXPERTS}
        | {"layer_types": ["full_attention", "sliding_attention"], "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 128, "moe_routed_scaling_factor": 2.5},
    ),
    "ministral3": ("Ministral3Config", {"num_hidden_layers": 2, "rope_parameters": GROWING}),
    "mistral4": (
        "Mistral4Config",
        LATENT | {"head_dim": 24, "n_group": 1, "topk_group": 1, "rope_parameters": GROWING},
    ),
    "mistral4_wide": (
        "Mistral4Config",
        WIDE
        | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "rope_parameters": GROWING}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0},
    ),
    "deepseek_v4": ("DeepseekV4Config", COMPRESSED),
    "deepseek_v4_wide": (
        "DeepseekV4Config",
        COMPRESSED
        | {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 512, "partial_rotary_factor": 0.125}
        | {"q_lora_rank": 128, "o_lora_rank": 128, "moe_intermediate_size": 128, "sliding_window": 32}
        | {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 8, "compress_rate_hca": 32, "hc_mult": 4}
        | {"hc_sinkhorn_iters": 20},
    ),
    "deepseek_v4_small": (
        "DeepseekV4Config",
        COMPRESSED
        | {"num_hidden_layers": 3, "compress_ratios": [4, 128, 0], "num_hash_layers": 1, "compress_rate_hca": 8}
        | {"hc_mult": 2, "hc_sinkhorn_iters": 2},
    ),
    "qwen4_exp": ("Qwen4ExpTextConfig", POOLED),
    "qwen4_exp_small": (
        "Qwen4ExpTextConfig",
        POOLED
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "qwen_sparse_attention"], "ple_layer_ids": [1]}
        | {"indexer_budget": 8, "hc_count": 2, "ngram_size": 2, "ple_conv_kernel_size": 3, "output_gate_type": "silu"},
    ),
    "qwen4_exp_wide": (
        "Qwen4ExpTextConfig",
        POOLED
        | {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 3, "hc_count": 4}
        | {"layer_types": ["linear_attention", "linear_attention", "qwen_sparse_attention"], "hc_lowrank": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 128, "indexer_head_dim": 128, "ple_embed_dim": 128, "heads_per_ngram": 8}
        | {"rope_parameters": POOLED["rope_parameters"] | {"mrope_section": [6, 5, 5]}},
    ),
    "llama_bias_llama3": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
}


FURTHER_FORMS = (
    "qwen3_tied_bias", "qwen3_windows_only", "qwen3_moe_mixed", "llama_bias_llama3", "deepseek_v2_lite",
    "deepseek_v32_selects_all", "mistral", "gemma3_capped", "gemma4_moe", "nemotron_h_latent",
    "nemotron_h_puzzle", "glm5_next", "deepseek_v4", "qwen4_exp",
)  # fmt: skip
"""Of families that have another one, with the same kinds of caches."""
OF_WRAPPERS: dict[str, dict[str, int]] = {"MuseGlimmerConfig": {"out_hidden_size": 64, "projector_hidden_size": 40}}
"""What configs of these classes have beside a text and a tower."""
PLACEHOLDERS = {"image_token_id": VOCAB, "video_token_id": VOCAB + 1}
"""Of configs with an encoder. Their logits are zero: no greedy answer has one, which transformers would not embed."""
BARE = {"mistral4": "Mistral4ForCausalLM"}
"""Text models that transformers' AutoModelForCausalLM knows beside an image encoder only, by `model_type`."""


def hf_model(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A tiny fp32 model in which every parameter is random (norms and biases too) and attention is far from uniform."""
    import transformers  # slow, and the ranks of a tensor-parallel test do not need it

    class_name, changes = TINY[name]
    # Some of these classes write into what they are given.
    values, wrapper = copy.deepcopy(SIZES | changes | more), WRAPPED.get(class_name)
    config_class = getattr(transformers, class_name)
    if wrapper is not None:
        values = {"text_config": values, "vision_config": wrapper} | OF_WRAPPERS.get(class_name, {})
    config = config_class(**values)
    for key in PLACEHOLDERS.keys() & config.to_dict().keys():
        setattr(config, key, PLACEHOLDERS[key])
    torch.manual_seed(seed)
    kind = transformers.AutoModelForCausalLM if wrapper is None else transformers.AutoModelForImageTextToText
    bare = BARE.get(config.model_type)
    make = kind.from_config if bare is None else getattr(transformers, bare)._from_config
    model = make(config, dtype=torch.float32).eval()
    give_own_sizes(model, values.get("block_configs", ()))
    randomize(model, name in ZERO_CENTRED)
    if wrapper is not None:
        with torch.no_grad():
            model.get_output_embeddings().weight[list(PLACEHOLDERS.values())] = 0.0
    return text_half(model)


def give_own_sizes(model: PreTrainedModel, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Makes the experts of Nemotron-Labs-3-Puzzle, in which layers have sizes of their own, of the classes of
    Nemotron-H. `blocks`: "block_configs"."""
    for i, block in enumerate(blocks):
        if block["block_type"] == "moe":
            config, layer = copy.deepcopy(model.config), model.get_decoder().layers[i]
            for key, value in block.items():
                setattr(config, key, value)
            layer.mixer = type(layer.mixer)(config, layer_idx=i)


def share_weights(whole: PreTrainedModel, target: PreTrainedModel) -> None:
    """Gives `target` those of `whole`, which has layers behind the same first ones: a draft's."""
    weights = whole.state_dict()
    target.load_state_dict({key: weights[key] for key in target.state_dict()})


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or of Inkling's the class of its text alone, with the same parameters: that of text and images norms
    embeddings twice in transformers 5.17. `whole` of it is what has a checkpoint."""
    if model.config.model_type != "inkling_mm_model":
        return model
    import transformers

    text = transformers.InklingForCausalLM._from_config(model.config.text_config, dtype=torch.float32).eval()
    text.model, text.lm_head = model.model.language_model, model.lm_head
    object.__setattr__(text, "whole", model)  # it is no part of it
    return text


def randomize(model: PreTrainedModel, zero_centred_norms: bool) -> None:
    # Sums of 64 and of 2,048 products are about as large.
    spread = 0.15 if model.config.get_text_config().hidden_size < 1024 else 0.03
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "norm" in key or key.endswith("scale"):
                # Qwen's hybrids store weights of norms minus 1, but for those of the recurrent layers' outputs.
                # Muse-Glimmer those of layers only.
                plain = "linear_attn" in key or ("muse" in model.config.model_type and "layernorm" not in key)
                centre = 0.0 if zero_centred_norms and not plain else 1.0
                param.uniform_(centre - 0.5, centre + 0.5)
            else:
                # Activations with limits reach them.
                limited = getattr(model.config.get_text_config(), "swiglu_limits", None) and "up_proj" in key
                param.normal_(0.0, 5 * spread if limited else spread)
        for key, buffer in model.named_buffers():
            if "correction" in key:
                buffer.uniform_(-0.2, 0.2)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.4)
            if "tid2eid" in key:
                buffer.copy_(distinct_experts(*buffer.shape, model.config.n_routed_experts))
        if getattr(
            model.config.get_text_config(), "tie_word_embeddings", False
        ):  # or else the likeliest next token is the last one
            model.get_input_embeddings().weight.mul_(0.1)


def distinct_experts(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """[num_tokens, top_k] int64: random experts of every token id."""
    return torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]


def reference_of(folder: Path) -> PreTrainedModel:
    """The transformers model of a folder, in fp32."""
    import transformers

    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    wrapped = model_type in ("step3p7", "muse_glimmer", "glm5_next", "inkling_mm_model")
    kind = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    if model_type in BARE:
        kind = getattr(transformers, BARE[model_type])
    return text_half(kind.from_pretrained(folder, dtype=torch.float32))


def save_tiny(name: str, folder: Path, **more: Any) -> PreTrainedModel:
    """`more`: config keys beside those of TINY. The same model is made once a run (`tiny_models.py`)."""
    return made_once(("tiny", name, more), folder, lambda made: _save_tiny(name, made, more))


def _save_tiny(name: str, folder: Path, more: dict[str, Any]) -> PreTrainedModel:
    model = hf_model(name, **more)
    getattr(model, "whole", model).save_pretrained(folder)
    if name.startswith("deepseek_v4"):
        as_published_v4(folder, TINY[name][1] | more)
    if name.startswith("minimax_m3"):
        as_published_m3(folder)
    if name.startswith("kimi_linear"):
        as_published_kimi_linear(folder)
    if name == "nemotron_h_puzzle":
        as_published_puzzle(folder)
    return model


def as_published_puzzle(folder: Path) -> None:
    """What transformers wrote of Nemotron-H, as Nemotron-Labs-3-Puzzle is published."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name.replace("backbone.", "model."): rows for name, rows in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"}
    (folder / "config.json").write_text(json.dumps(config))


def as_published_kimi_linear(folder: Path) -> None:
    """What transformers wrote of Kimi Linear, with the keys of published checkpoints, and with their names of the dense
    layers, which transformers turns into those of experts."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        if ".block_sparse_moe." in name and name.split(".block_sparse_moe.")[1].split(".")[0].endswith("_proj"):
            name = name.replace(".block_sparse_moe.", ".mlp.")
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    kinds = config.pop("layer_types")
    names = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
    inner: dict[str, Any] = {
        name: [i + 1 for i, kind in enumerate(kinds) if kind == of_kind] for name, of_kind in names.items()
    }
    flat = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    flat |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    inner |= {key: config.pop(name) for key, name in flat.items()}
    dense = config.pop("mlp_layer_types").count("dense")
    config |= {"linear_attn_config": inner, "first_k_dense_replace": dense, "moe_layer_freq": 1, "mla_use_nope": True}
    config |= {"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "use_grouped_topk": True}
    config |= {"num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))


M3_NAMES = (
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    (".indexer.", ".index_"),
    (".gate.e_score", ".e_score"),
)
"""Pieces of names in what transformers writes of MiniMax-M3's text, and in published checkpoints."""


def as_published_m3(folder: Path) -> None:
    """What transformers wrote of MiniMax-M3's text, with the names and keys of published checkpoints, beside tensors of
    an encoder and of drafts."""
    file = folder / "model.safetensors"
    tensors = {"vision_tower.vision_model.pre_layrnorm.weight": torch.ones(16), "mtp.norm.weight": torch.ones(4)}
    for name, tensor in safetensors.torch.load_file(file).items():
        for written, published in M3_NAMES:
            if name.startswith(written) or written.startswith("."):
                name = name.replace(written, published, 1)
        tensors |= published_m3(name, tensor)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    text = published_m3_text(json.loads((folder / "config.json").read_text()))
    config = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text, "dtype": text["dtype"]}))


def published_m3_text(text: dict[str, Any]) -> dict[str, Any]:
    """The keys of published checkpoints for what transformers writes of MiniMax-M3's text, which is changed."""
    sparse = [int(kind == "minimax_m3_sparse") for kind in text.pop("layer_types")]
    flat = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks")
    nested = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")
    inner = {ours: text.pop(key) for ours, key in zip((*nested, "sparse_local_block"), flat, strict=True)}
    inner |= {"use_sparse_attention": True, "sparse_attention_freq": sparse, "sparse_disable_index_value": sparse}
    inner |= {"sparse_score_type": "max", "sparse_init_block": 0}
    rope = text.pop("rope_parameters")
    text |= {"moe_layer_freq": [int(kind == "sparse") for kind in text.pop("mlp_layer_types")], "n_shared_experts": 1}
    text |= {"hidden_act": "swigluoai", "qk_norm_type": "per_head", "use_gemma_norm": True, "use_qk_norm": True}
    text |= {"scoring_func": "sigmoid", "use_routing_bias": True, "attention_output_gate": False}
    text |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5, "num_mtp_modules": 1}
    return text | {"sparse_attention_config": inner}


def published_m3(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The published tensors of one that transformers wrote: experts one by one, gate and up apart."""
    if ".mlp.experts." in name:
        stem = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
        parts = {"w2": tensor}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
        return {
            f"{stem}.{expert}.{part}.weight": weights[expert]
            for part, weights in parts.items()
            for expert in range(len(tensor))
        }
    for module in ("gate.", "e_score", "shared_experts."):
        name = name.replace(f".mlp.{module}", f".block_sparse_moe.{module}")
    if name.endswith("gate_up_proj.weight"):
        return {
            name.replace("gate_up_proj", f"{part}_proj"): rows
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True)
        }
    return {name: tensor}


def as_published_v4(folder: Path, changes: dict[str, Any]) -> None:
    """What transformers wrote of DeepSeek-V4, with the names and keys of published checkpoints."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        published = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        tensors[published.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        del config[key]
    rates = [changes["compress_rate_hca"] if rate == 128 else rate for rate in changes["compress_ratios"]]
    # One rate more, of the layer that drafts use.
    config |= {"compress_ratios": [*rates, 0], "num_hash_layers": changes["num_hash_layers"]}
    config |= {"rope_scaling": changes["rope_scaling"]}
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class NativePlan:
    """What models read of a Plan, with the torch kernels."""

    model: ModelConfig
    context_len: int = 256
    device: str = "cpu"
    arch: ArchTraits = CPU
    kv_cache_dtype: str = "float32"
    ranks: RankLayout = ONE_RANK
    tokens_per_step: int = 16
    verified_tokens: int = 1
    max_running_requests: int = 8
    aux_layers: tuple[int, ...] = ()
    aux_keeps_streams: bool = False
    merge_method: str = ALL_TO_ALL
    num_positions: int = 256
    model_impl: str = "auto"
    trust_remote_code: bool = False
    adapters: None = None
    cache_scales: CacheScales | None = None

    @property
    def decode_rows(self) -> int:
        return self.max_running_requests * self.verified_tokens

    @property
    def dtype(self) -> str:
        return self.model.dtype

    @functools.cached_property
    def description(self) -> ModelDescription:
        apart = "--ep-size" if self.ranks.ep_size > 1 else ""
        description = describe_served(
            ServerArgs(
                model_path=self.model.model_path,
                model_impl=self.model_impl,
                trust_remote_code=self.trust_remote_code,
            ),
            self.model.hf_config,
            self.model.quantization,
            apart,
            self.model.model_path,
            self.model.text_keys,
            self.model.written_config,
        )
        description.require_served()
        return description

    @property
    def draft(self) -> DraftPlan | None:
        return None

    @functools.cached_property
    def weights(self) -> RankWeights:
        return rank_weights(self.description, self.ranks)

    def weight_bytes(self) -> int:
        return rank_weight_bytes(self.weights, self.dtype)

    @property
    def choices(self) -> Mapping[str, Any]:
        """Every op runs on a kernel of torch."""
        return defaultdict(lambda: SimpleNamespace(spec=SimpleNamespace(package="torch")))

    def entry(self, op: Op[Any], key: str = "") -> Any:
        return op.reference

    def attention_op(self, op: str, shape: object) -> str:
        return op

    def tile(self, op: str) -> None:
        return None

    def tiles(self, op: str, shape: object = None) -> TileConfigs:
        return ()


def plan_for(folder: Path, **args: Any) -> NativePlan:
    server_args = ServerArgs(model_path=str(folder), **args)
    model = ModelConfig.from_server_args(server_args)
    cache = kv_cache_dtype(server_args.kv_cache_dtype, model.dtype, model.quantization)
    ranks = RankLayout(server_args.tp_size, server_args.ep_size)
    return NativePlan(
        model,
        kv_cache_dtype=cache,
        ranks=ranks,
        model_impl=server_args.model_impl,
        trust_remote_code=server_args.trust_remote_code,
    )


def blocks_of(layer: DecoderLayer) -> tuple[Any, Any]:
    """The mixer and the feed-forward block of a layer that has both."""
    mixer, ffn, *_ = (block for _, block in layer.blocks)
    return mixer, ffn


class TinyRunner:
    """Steps a loaded model. Every token gets a random cache slot, so that nothing works by contiguity."""

    def __init__(self, plan: NativePlan, load_format: str = "auto", seed: int = 0, state_dtype: str = "") -> None:
        self.model = filled_model(plan, load_format)
        serving = ParallelConfig(
            plan.dtype, plan.kv_cache_dtype, ranks=RankLayout(plan.ranks.tp_size), state_dtype=state_dtype
        )
        everything = with_draft_layers(plan.description, plan.draft)
        groups = cache_groups(everything, serving)
        windows = tuple(WindowSize(lifetime.tokens, 1023) for lifetime in row_tables(groups)[1:])
        self.page = math.lcm(*(group.page_multiple for group in groups))
        sizes = PoolSizes(1024 - self.page, self.page, 8, plan.context_len, windows)
        self.pools = CachePools(groups, sizes, "cpu")
        self.pools.bind(self.model.caches)
        self.num_tables = len(self.pools.tables)
        self.table = torch.full((9, plan.context_len), -7, dtype=torch.int32)
        pages = torch.randperm(1024 // self.page - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free = (pages * self.page).tolist()
        self.lens: dict[int, int] = {}
        backend = TorchNativeAttnBackend(plan, "cpu")
        sites = attention_sites(everything, plan.ranks.tp_size)
        latent = latent_sites(everything.layers, plan.ranks.tp_size)
        self.attention = AttentionSites(
            {site: backend.decode_builder(site) for site in sites},
            {site: backend.extend_builder(site) for site in sites},
            latent,
            plan.tokens_per_step,
            sparse_sites(everything.layers, plan),
            tables=row_tables(groups),
        )

    def _batch(self, decodes: bool, new: dict[int, list[int]]) -> ForwardBatch:
        slots, positions, locs, prefix = list(new), [], [], []
        for slot, tokens in new.items():
            start = self.lens.get(slot, 0)
            prefix.append(start)
            loc = []
            for position in range(start, start + len(tokens)):
                # Pages hold whole entries; within one the slots follow one another.
                loc.append(self.table[slot, position - 1].item() + 1 if position % self.page else self.free.pop())
                self.table[slot, position] = loc[-1]
            positions += range(start, start + len(tokens))
            locs += loc
            self.lens[slot] = start + len(tokens)
        seq_lens = [self.lens[s] for s in slots]
        extend = [len(tokens) for tokens in new.values()]
        token_slots = (TokenSlots(self.table, torch.tensor(locs)),) * self.num_tables
        requests, lens = torch.tensor(slots), torch.tensor(seq_lens, dtype=torch.int32)
        batch = ForwardBatch(
            torch.tensor([t for tokens in new.values() for t in tokens]), torch.tensor(positions), token_slots
        )
        if decodes:
            batch.decode = DecodeRows(requests, lens, token_slots, seq_lens)
        else:
            start_loc = torch.tensor([0, *extend], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            prefix_lens = torch.tensor(prefix, dtype=torch.int32)
            batch.extend = ExtendRows(requests, lens, prefix_lens, start_loc, token_slots, extend, prefix, seq_lens)
        batch.metadata = self.attention.metadata(batch)
        return batch

    def end(self, slot: int) -> None:
        """The request is over; its cache slots are used again."""
        length = self.lens.pop(slot)
        self.free += self.table[slot, : length : self.page].tolist()

    def batch_of_prompts(self, new: dict[int, list[int]]) -> ForwardBatch:
        """Ready for the model."""
        return self._batch(False, new)

    @torch.inference_mode()
    def extend(self, new: dict[int, list[int]]) -> list[torch.Tensor]:
        """New tokens of each request slot -> logits [n, V] of each."""
        batch = self.batch_of_prompts(new)
        logits = self.model.logits(self.model(batch))
        return list(logits.split([len(tokens) for tokens in new.values()]))

    @torch.inference_mode()
    def decode(self, new: dict[int, int]) -> torch.Tensor:
        """The next token of each request slot -> logits [B, V]."""
        batch = self._batch(True, {slot: [token] for slot, token in new.items()})
        return self.model.logits(self.model(batch))


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[n, V] fp32."""
    return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
