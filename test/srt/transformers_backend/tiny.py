"""Small random models of transformers' causal classes."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 250
"""Token ids below this are valid in every model."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "dff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 2),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size", "sliding_window_size"), 12),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "vocab_size": 256,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_head_dim": 24,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "num_mem_blocks": 2,
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
_MADE_ANEW = ("layer_types", "mlp_layer_types", "sliding_window_pattern_list", "no_rope_layers")
"""Lists by layer, which follow from the other keys."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HEADS = {"head_dim": 16, "num_key_value_heads": 2}
_OF_CLASS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {**_HEADS, "moe_topk": 2, "num_experts": 8},
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral": _HEADS,
    "nemotron": _HEADS,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys without a default, or whose default does not go with the sizes. Published LFM2 models have convolutions."""


KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model types that have a causal class. Tests are collected by this list: `causal_classes` imports every config."""


@functools.cache
def causal_classes() -> dict[str, str]:
    """Returns the class of each model type, each class once: with its own model type, if others have it, too."""

    def borrowed(item: tuple[str, str]) -> bool:
        kind, name = item
        return not name.startswith(CONFIG_MAPPING_NAMES[kind].removesuffix("Config"))

    found: dict[str, str] = {}
    for kind, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=borrowed):
        if name not in found.values() and not nested(kind):
            found[kind] = name
    return found


def nested(kind: str) -> bool:
    """Returns whether a model type's config has others inside, such as that of an encoder of images."""
    return bool(CONFIG_MAPPING[kind].sub_configs)


def tiny_config(kind: str) -> Any:
    """Returns a small config of a model type."""
    default = transformers.AutoConfig.for_model(kind)
    values = {key: value for key, value in default.to_dict().items() if key not in _MADE_ANEW}
    sized = {key: size for key, size in _SIZES.items() if values.get(key) is not None}
    if values.get("kv_lora_rank"):  # heads of latents, whose "head_dim" is that of their rotary part
        sized |= {"head_dim": _SIZES["qk_rope_head_dim"], "num_key_value_heads": _SIZES["num_attention_heads"]}
    with suppress(Exception):
        return type(default).from_dict({**values, **sized, **_OF_CLASS.get(kind, {})})
    return default  # of a class with states, whose sizes depend on each other; no such class is served


def save_tiny(kind: str, folder: Path) -> Any:
    """Saves a random model in fp32, and returns it."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    config._attn_implementation = "eager"  # the others leave out caps of scores
    model = getattr(transformers, causal_classes()[kind])(config).float().eval()
    fill_randomly(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def fill_randomly(model: Any) -> None:
    """Fills the parameters with values that all count."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.08)
        elif "norm" in name.lower() or "ln_" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, 0.1)


def config_values(config: Any, architecture: str) -> dict[str, Any]:
    """Returns the values of a config's config.json."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**values, "architectures": [architecture]}
