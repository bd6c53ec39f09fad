"""What of a Hugging Face config.json decides which kernels a model needs. Reads any family that we know the keys of,
whether or not its model class exists here, so that `explain` can answer for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.quant_rules import QuantConfig
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
    router: str  # "softmax", "sigmoid" or "sqrtsoftplus"
    hash_routed: bool  # some layers choose experts by token ids
    shared_as_routed: bool  # the shared expert can be one more of the routed ones
    linear_attention: bool
    sparse_index: bool
    attention_traits: frozenset[str]
    vision_head_dim: int
    expert_quant: str | None
    """The scheme of the routed experts; None: 16 bits."""
    linear_quants: tuple[str, ...]
    """The schemes of the other linear layers. Some layers are always in 16 bits."""

    @property
    def is_latent(self) -> bool:
        return "mla" in self.attention_traits


def facts_from_config(config: Config, quantization: QuantConfig | None) -> ModelFacts:
    """Facts of a config.json (multimodal wrappers included) and of the quantization that was detected for it.

    Raises UserError naming a key that is missing, or experts that are quantized in several ways.
    """
    text: Config = config.get("text_config") or config
    heads = _require(text, "num_attention_heads")
    hidden = _require(text, "hidden_size")
    layers = _require(text, "num_hidden_layers")
    kinds = text.get("layer_types") or []
    num_experts = int(_first(text, "n_routed_experts", "num_experts", "num_local_experts"))
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
        shared_as_routed=_shared_as_routed(quantization, config, num_experts),
        hash_routed=bool(text.get("num_hash_layers")) or "hash_moe" in (text.get("mlp_layer_types") or []),
        linear_attention="linear_attention" in kinds,
        sparse_index=bool(text.get("index_topk")),
        attention_traits=_attention_traits(text, kinds),
        vision_head_dim=_vision_head_dim(config.get("vision_config")),
        expert_quant=_expert_quant(quantization, config, num_experts),
        linear_quants=_linear_quants(quantization, config, num_experts),
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


# The language model's layers in a checkpoint; which of these a multimodal one has, its patterns tell.
_PREFIXES = ("model.layers.", "language_model.model.layers.", "model.language_model.layers.")
_GQA_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLA_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
_GATED_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _prefix(quant: QuantConfig, config: Config) -> str:
    if not config.get("text_config"):
        return _PREFIXES[0]
    said = " ".join(pattern.replace("\\", "") for rule in quant.rules for pattern in rule.patterns)
    return next((prefix for prefix in _PREFIXES[1:] if prefix.split(".layers")[0] in said), _PREFIXES[0])


def _linear_quants(quant: QuantConfig | None, config: Config, num_experts: int) -> tuple[str, ...]:
    if quant is None:
        return ()
    text: Config = config.get("text_config") or config
    prefix = _prefix(quant, config)
    names = (prefix + name for i in range(text["num_hidden_layers"]) for name in _linear_modules(text, i, num_experts))
    return tuple(sorted({found.scheme for found in map(quant.of, names) if found is not None}))


def _linear_modules(text: Config, layer: int, num_experts: int) -> Iterator[str]:
    """Names of the usual linear modules of a layer, but for its routed experts."""
    kinds = text.get("layer_types") or []
    if layer < len(kinds) and kinds[layer] == "linear_attention":
        yield from (f"{layer}.linear_attn.{name}" for name in ("in_proj_qkv", "out_proj"))
    else:
        projections = _MLA_PROJECTIONS if text.get("kv_lora_rank") else _GQA_PROJECTIONS
        yield from (f"{layer}.self_attn.{name}" for name in projections)
    if not num_experts or _is_dense(text, layer):
        yield from (f"{layer}.mlp.{name}" for name in _GATED_PROJECTIONS)
    elif _first(text, "n_shared_experts", "shared_expert_intermediate_size"):
        shared = "shared_experts" if text.get("n_shared_experts") else "shared_expert"
        yield from (f"{layer}.mlp.{shared}.{name}" for name in _GATED_PROJECTIONS)


def _is_dense(text: Config, layer: int) -> bool:
    """Of a model with experts, a layer without."""
    if layer < int(text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or []):
        return True
    return (layer + 1) % int(text.get("decoder_sparse_step") or 1) != 0


def _shared_as_routed(quant: QuantConfig | None, config: Config, num_experts: int) -> bool:
    """One ungated shared expert of the same size, whose weights are stored as theirs (`layers.moe.layer.why_apart`)."""
    text: Config = config.get("text_config") or config
    if not num_experts or text.get("n_shared_experts") != 1:
        return False
    if quant is None:
        return True
    prefix, last = _prefix(quant, config), text["num_hidden_layers"] - 1
    own, theirs = (quant.of(f"{prefix}{last}.mlp.{name}.gate_proj") for name in ("shared_experts", "experts.0"))
    return own == theirs


def _expert_quant(quant: QuantConfig | None, config: Config, num_experts: int) -> str | None:
    if quant is None or not num_experts:
        return None
    text: Config = config.get("text_config") or config
    sparse = [i for i in range(text["num_hidden_layers"]) if not _is_dense(text, i)]
    prefix = _prefix(quant, config)
    names = [f"{prefix}{i}.mlp.experts.0.{name}" for i in sparse for name in _GATED_PROJECTIONS]
    found = {None if module is None else module.scheme for module in map(quant.of, names)}
    if len(found) > 1:
        schemes = ", ".join(sorted(scheme or "16 bits" for scheme in found))
        raise UserError(f"{quant.source}: experts that are quantized in several ways are not supported: {schemes}.")
    return next(iter(found), None)
