"""Reads keys of a config.json by which layers differ or share something: overrides by layer, caches that several layers
attend to, embeddings that are added in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.configs.activation import LEAST_RESULT_LIMIT, Activation
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.rope import rope_parameters
from sglang.srt.errors import UserError
from sglang.srt.plan.feed_forward import Dense, MoE
from sglang.srt.plan.layer_spec import ABSENT, FeedForward, LayerSpec, Mixer
from sglang.srt.plan.mixers import GQA
from sglang.srt.plan.per_layer import PerLayerEmbedding

Override = tuple[tuple[str, Any], ...]
"""Keys and values of one layer that differ from those of the config."""

_OVERRIDES = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads"})


def layer_overrides(keys: ConfigReader, num_layers: int) -> list[Override]:
    """Returns the overrides of each layer from `num_attention_heads_per_layer` and `per_layer_config`, as newer
    transformers write it: {"5": {"head_dim": 512}}. Raises UserError."""
    written = keys.default("per_layer_config", dict, {})
    overrides: list[Override] = [()] * num_layers
    heads = keys.default("num_attention_heads_per_layer", list, [])
    if heads and (len(heads) < num_layers or any(type(count) is not int or count < 1 for count in heads)):
        raise UserError(f"{keys.source}: 'num_attention_heads_per_layer' must be {num_layers} numbers; got {heads!r}.")
    for layer, count in enumerate(heads[:num_layers]):
        overrides[layer] = (("num_attention_heads", count),)
    for layer, values in written.items():
        if not str(layer).isdigit() or int(layer) >= num_layers or not isinstance(values, Mapping):
            raise UserError(f"{keys.source}: 'per_layer_config' has {layer!r}: {values!r} for {num_layers} layers.")
        unknown = sorted(values.keys() - _OVERRIDES)
        if unknown:
            raise UserError(f"{keys.source}: 'per_layer_config' with {', '.join(unknown)} is not described here yet.")
        overrides[int(layer)] = tuple(sorted(values.items()))
    return overrides


def with_shared_caches(mixers: Sequence[Mixer], kinds: Sequence[str], keys: ConfigReader) -> list[Mixer]:
    """Returns the mixers, of which the last `num_kv_shared_layers` attend to the cache of the last earlier layer of
    their kind. Raises UserError where there is none."""
    result = list(mixers)
    first = len(mixers) - keys.count("num_kv_shared_layers")
    for i in range(max(first, 0), len(mixers)):
        source = next((j for j in reversed(range(max(first, 0))) if kinds[j] == kinds[i]), None)
        shared, sharing = (result[source] if source is not None else None), result[i]
        if source is None or not isinstance(shared, GQA) or not isinstance(sharing, GQA):
            number = keys.count("num_kv_shared_layers")
            raise UserError(
                f"{keys.source}: 'num_kv_shared_layers' is {number}, but before these layers none is of the kind"
                f" {kinds[i]}, whose cache layer {i} could share."
            )
        result[source] = replace(shared, cache_shared=True)
        result[i] = replace(sharing, cache_layer=source, values_from_keys=False)
    return result


_GROWTH = "llama_4_scaling_beta"


def attn_temperature_scaling(keys: ConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (fields of GQA for attention temperature scaling, rotary parameters without its keys). Raises UserError
    for values that cannot be read."""
    written = rope_parameters(keys.values)
    growth, length = written.get(_GROWTH) or 0.0, written.get("original_max_position_embeddings")
    if isinstance(growth, bool) or not isinstance(growth, (int, float)) or growth < 0:
        raise UserError(f"{keys.source}: the rotary {_GROWTH!r} must be a number; got {growth!r}.")
    others = {key: value for key, value in written.items() if key not in (_GROWTH, "max_position_embeddings")}
    changes = {"rope_parameters": others, "rope_scaling": None}
    if not growth:
        return {}, changes
    if type(length) is not int or length < 1:
        raise UserError(f"{keys.source}: {_GROWTH!r} needs 'original_max_position_embeddings'; got {length!r}.")
    return {"attn_temperature": float(growth), "attn_temperature_length": length}, changes


def enumerated(listed: Any, num_layers: int, source: str) -> list[str]:
    """Returns the kinds of all layers from a list of those with experts: "3,4,5", or numbers. Raises UserError."""
    numbers = [str(item).strip() for item in (listed.split(",") if isinstance(listed, str) else listed)]
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"{source}: 'moe_layers_enum' must be a list of layers' numbers; got {listed!r}.")
    sparse = set(map(int, numbers))
    return ["sparse" if i in sparse else "dense" for i in range(num_layers)]


def with_limits(ffns: Sequence[Dense | MoE], keys: ConfigReader, unsupported: list[str]) -> list[Dense | MoE]:
    """Returns the feed-forward blocks with the limits of their activations: `swiglu_limits` for routed experts,
    `swiglu_limits_shared` for shared experts and MLPs. Both lists have an entry a layer; null and 0 mean no limit."""
    routed, others = (_limits(keys, key, len(ffns), unsupported) for key in ("swiglu_limits", "swiglu_limits_shared"))
    result: list[Dense | MoE] = []
    for ffn, of_routed, of_other in zip(ffns, routed, others, strict=True):
        mine, other = (
            replace(ffn.activation, limit=limit, limits_result=True) if limit else ffn.activation
            for limit in (of_routed, of_other)
        )
        if isinstance(ffn, Dense):
            result.append(replace(ffn, activation=other))
            continue
        shared = ffn.shared and replace(ffn.shared, activation=other if other != mine else None)
        result.append(replace(ffn, activation=mine, shared=shared))
    return result


def _limits(keys: ConfigReader, key: str, num_layers: int, unsupported: list[str]) -> list[float]:
    values = keys.default(key, list, []) or [0] * num_layers
    limits = [0.0 if value is None else value for value in values]
    if len(limits) < num_layers or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in limits):
        raise UserError(f"{keys.source}: {key!r} must be a list of numbers, one for each of {num_layers} layers.")
    small = [limit for limit in limits if limit and not limit >= LEAST_RESULT_LIMIT]
    if small:
        unsupported.append(
            f"{keys.source}: {key} has {small[0]!r}; limits below {LEAST_RESULT_LIMIT} are not supported, because the"
            " kernels clamp before the function."
        )
    return [float(limit) for limit in limits[:num_layers]]


def with_double_wide_mlp(layer: LayerSpec) -> LayerSpec:
    """Returns the layer with an MLP (or shared expert) twice as wide."""
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        return replace(layer, ffn=replace(ffn, intermediate_size=2 * ffn.intermediate_size))
    assert isinstance(ffn, MoE) and ffn.shared is not None
    shared = replace(ffn.shared, intermediate_size=2 * ffn.shared.intermediate_size)
    return replace(layer, ffn=replace(ffn, shared=shared))


def per_layer_embedding(keys: ConfigReader, num_layers: int, activation: Activation) -> FeedForward:
    """Returns the embeddings that tokens add in every layer, or ABSENT."""
    size = keys.count("hidden_size_per_layer_input")
    if not size:
        return ABSENT
    return PerLayerEmbedding(size, num_layers, keys.positive("vocab_size_per_layer_input"), activation)
