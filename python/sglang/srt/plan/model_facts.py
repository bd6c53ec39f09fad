"""What of a Hugging Face config.json decides which kernels a model needs. Reads any family that we know the keys of,
whether or not its model class exists here, so that `explain` can answer for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.errors import UserError

Config = Mapping[str, Any]

_SIGMOID_ROUTERS = frozenset({"glm4_moe", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "minimax_m2"})
_WITH_SINKS = frozenset({"gpt_oss", "deepseek_v4"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of the whole model (not of one rank). Zero means that the model has none of it."""

    architecture: str
    dtype: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # as cached and attended: MLA has kv_lora_rank + rope
    v_head_dim: int
    prompt_head_dims: tuple[int, int] | None  # MLA only: dims of dense attention over uncompressed keys
    attention_layers: int  # with a KV cache
    dense_inter: int
    num_experts: int
    top_k: int
    expert_inter: int
    router: str  # "softmax" or "sigmoid"
    linear_attention: bool
    sparse_index: bool
    attention_traits: frozenset[str]
    vision_head_dim: int
    expert_quant: str | None
    linear_quant: str | None

    @property
    def is_latent(self) -> bool:
        return "mla" in self.attention_traits


def quantization_of(config: Config, directory: Path) -> Config | None:
    """The quantization of a checkpoint: in config.json (of a multimodal model inside or outside of the text part), or
    in ModelOpt's file beside it."""
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                found: Config = part[key]
                return found
    modelopt = directory / "hf_quant_config.json"
    if modelopt.is_file():
        return read_json_object(modelopt).get("quantization") or {}
    return None


def facts_from_config(config: Config, quantization: Config | None) -> ModelFacts:
    """Facts of a config.json (multimodal wrappers included) and of the quantization that was detected beside it.

    Raises UserError naming a key that is missing.
    """
    text: Config = config.get("text_config") or config
    heads = _require(text, "num_attention_heads")
    hidden = _require(text, "hidden_size")
    layers = _require(text, "num_hidden_layers")
    kinds = text.get("layer_types") or []
    num_experts = int(_first(text, "n_routed_experts", "num_experts", "num_local_experts"))
    expert_quant, linear_quant = _quant_schemes(quantization or {})
    head_dim, v_head_dim, prompt_dims = _head_dims(text, hidden, heads)
    return ModelFacts(
        architecture=(config.get("architectures") or ["unknown"])[0],
        dtype=_dtype(text, config),
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=_require(text, "vocab_size"),
        num_heads=heads,
        num_kv_heads=1 if prompt_dims else int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        prompt_head_dims=prompt_dims,
        attention_layers=sum(kind != "linear_attention" for kind in kinds) if kinds else layers,
        dense_inter=int(text.get("intermediate_size") or 0),
        num_experts=num_experts,
        top_k=int(_first(text, "num_experts_per_tok", "experts_per_token")) if num_experts else 0,
        expert_inter=int(_first(text, "moe_intermediate_size", "intermediate_size")) if num_experts else 0,
        router=_router(text),
        linear_attention="linear_attention" in kinds,
        sparse_index=bool(text.get("index_topk")),
        attention_traits=_attention_traits(text, kinds),
        vision_head_dim=_vision_head_dim(config.get("vision_config")),
        expert_quant=expert_quant,
        linear_quant=linear_quant,
    )


def _dtype(text: Config, config: Config) -> str:
    written = _first(text, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype") or "bfloat16"
    return str(written).removeprefix("torch.")


def _require(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key)), 0)


def _head_dims(text: Config, hidden: int, heads: int) -> tuple[int, int, tuple[int, int] | None]:
    latent = text.get("kv_lora_rank")
    if latent:
        rope = _require(text, "qk_rope_head_dim")
        nope, value = _require(text, "qk_nope_head_dim"), _require(text, "v_head_dim")
        return latent + rope, latent, (nope + rope, value)
    head_dim = int(text.get("head_dim") or hidden // heads)
    return head_dim, head_dim, None


def _attention_traits(text: Config, kinds: list[str]) -> frozenset[str]:
    traits = {
        "mla": bool(text.get("kv_lora_rank")),
        "sparse": bool(text.get("index_topk")),
        "sliding_window": "sliding_attention" in kinds,
        "sinks": text.get("model_type") in _WITH_SINKS,
        "logit_cap": bool(text.get("attn_logit_softcapping")),
        "hybrid_gdn": "linear_attention" in kinds,
    }
    return frozenset(name for name, present in traits.items() if present)


def _router(text: Config) -> str:
    scoring = text.get("scoring_func")
    if scoring:
        return str(scoring)
    return "sigmoid" if text.get("model_type") in _SIGMOID_ROUTERS else "softmax"


def _vision_head_dim(vision: Config | None) -> int:
    if not vision:
        return 0
    hidden, heads = (
        _first(vision, "vt_hidden_size", "hidden_size"),
        _first(vision, "vt_num_attention_heads", "num_heads", "num_attention_heads"),
    )
    return hidden // heads if hidden and heads else 0


def _quant_schemes(quant: Config) -> tuple[str | None, str | None]:
    """(experts, other linear layers); None is unquantized."""
    scheme = _scheme(quant)
    excluded = json.dumps([quant.get("ignore"), quant.get("modules_to_not_convert")])
    return scheme, None if scheme == "mxfp4" or "self_attn" in excluded else scheme


def _scheme(quant: Config) -> str | None:
    # ModelOpt's method says only who made the checkpoint; its algorithm is the format.
    method = str(quant.get("quant_algo") or quant.get("quant_method") or "").lower()
    if not method:
        return None
    if method == "fp8" and quant.get("weight_block_size"):
        return "fp8_block" + "x".join(str(n) for n in quant["weight_block_size"])
    if method == "compressed-tensors":
        return _compressed_tensors_scheme(quant)
    return "nvfp4" if "nvfp4" in method else method


def _compressed_tensors_scheme(quant: Config) -> str:
    if "nvfp4" in str(quant.get("format")):
        return "nvfp4"
    group: Config = next(iter((quant.get("config_groups") or {}).values()), {})
    weights = group.get("weights") or {}
    if weights.get("type") == "int":
        return f"int{weights.get('num_bits')}_g{weights.get('group_size')}"
    return "w8a8_fp8" if group.get("input_activations") else "w8a16_fp8"
