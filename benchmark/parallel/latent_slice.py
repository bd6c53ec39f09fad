"""A few layers of DeepSeek-V3's shapes with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

EXPERT_LAYERS = 1
"""So few that five servers of two ranks fit in 80 GB of each GPU at once."""
SHAPES: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Of DeepSeek-V3's config.json, without its layers for multi-token prediction."""
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
"""The latents stay as wide as DeepSeek-V3's, which its kernels are for."""


def save_slice(folder: Path, tokenizer: Path, small: bool = False) -> Path:
    """Writes the config.json of three dense layers and one of experts in FP8, as wide as DeepSeek-V3's, with the
    tokenizer of another model; `small`: of a few narrow ones, to try a script."""
    layers = SHAPES["first_k_dense_replace"] + EXPERT_LAYERS
    config = SHAPES | (SMALL if small else {"num_hidden_layers": layers, "quantization_config": QUANTIZED})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return folder
