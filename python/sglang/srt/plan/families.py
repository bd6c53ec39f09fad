"""What config.json files leave out because every model of a family has it. Data; `model_description` reads the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of all models of one `model_type`, where their config does not say otherwise."""

    qk_norm: str = ""  # as GQA.qk_norm
    o_bias: bool = True  # whether `attention_bias` stands for the output projection too
    sinks: bool = False
    router: str = "softmax"
    correction: bool = False  # the router has a bias that counts for the choice only
    router_bias: bool = False
    expert_bias: bool = False
    among_recurrent: bool = False


_DEEPSEEK = Family(router="sigmoid", correction=True)
_QWEN3 = Family(qk_norm="head")
_QWEN3_HYBRID = Family(qk_norm="head", among_recurrent=True)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_next": _QWEN3_HYBRID,
    "qwen3_5": _QWEN3_HYBRID,
    "qwen3_5_moe": _QWEN3_HYBRID,
    "glm4_moe": Family(qk_norm="head", o_bias=False, router="sigmoid", correction=True),
    "glm_moe_dsa": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v4": Family(router="sqrtsoftplus", correction=True, sinks=True),
    "deepseek_ref": Family(router="sqrtsoftplus", correction=True, sinks=True),  # V4 as its FP8 exports call it
    "gpt_oss": Family(sinks=True, router_bias=True, expert_bias=True),
    "minimax_m2": Family(qk_norm="whole", router="sigmoid", correction=True),
}
"""By `model_type` without "_text". A model of another type is read by the usual keys, and said to be an estimate."""

FAMILY_OF_ARCHITECTURE: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""What the models served here are, whatever `model_type` says."""

UNREAD_LAYERS: Mapping[str, str] = {
    "hybrid_override_pattern": "Mamba-2 layers",
    "layers_block_type": "Mamba-2 layers",
    "block_configs": "layers of several widths",
    "linear_attn_config": "Kimi delta attention",
    "sparse_attention_config": "block-sparse attention",
    "hybrid_layer_pattern": "window layers with heads of their own",
}
"""Keys of configs whose layers are not described here: a plan that took no notice of them would be wrong."""
