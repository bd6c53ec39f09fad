"""Reads the keys of a config.json by which its layers differ or share something: overrides by layer, caches that
several layers attend to, embeddings that enter every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.configs.activation import Activation
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.feed_forward import Dense, MoE
from sglang.srt.plan.layer_spec import ABSENT, FeedForward, LayerSpec, Mixer
from sglang.srt.plan.mixers import GQA
from sglang.srt.plan.per_layer import PerLayerEmbedding

Override = tuple[tuple[str, Any], ...]
"""Keys and values of one layer that differ from those of the config."""

_OVERRIDES = frozenset({"head_dim", "num_key_value_heads"})


def layer_overrides(keys: ConfigReader, num_layers: int) -> list[Override]:
    """Returns the overrides of each layer from `per_layer_config`, as newer transformers write it: {"5": {"head_dim":
    512}}. Raises UserError."""
    written = keys.default("per_layer_config", dict, {})
    overrides: list[Override] = [()] * num_layers
    for layer, values in written.items():
        if not str(layer).isdigit() or int(layer) >= num_layers or not isinstance(values, Mapping):
            raise UserError(f"{keys.source}: 'per_layer_config' has {layer!r}: {values!r} for {num_layers} layers.")
        unknown = sorted(values.keys() - _OVERRIDES)
        if unknown:
            raise UserError(f"{keys.source}: 'per_layer_config' with {', '.join(unknown)} is not described here yet.")
        overrides[int(layer)] = tuple(sorted(values.items()))
    return overrides


def with_shared_caches(mixers: Sequence[Mixer], kinds: Sequence[str], keys: ConfigReader) -> list[Mixer]:
    """Makes the last `num_kv_shared_layers` attend to the cache of the last layer of their kind before them. Raises
    UserError where there is none."""
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


def widened(layer: LayerSpec) -> LayerSpec:
    """Returns the layer with an MLP twice as wide."""
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        return replace(layer, ffn=replace(ffn, intermediate_size=2 * ffn.intermediate_size))
    assert isinstance(ffn, MoE) and ffn.shared is not None
    shared = replace(ffn.shared, intermediate_size=2 * ffn.shared.intermediate_size)
    return replace(layer, ffn=replace(ffn, shared=shared))


def per_layer_embedding(keys: ConfigReader, num_layers: int, activation: Activation) -> FeedForward:
    size = keys.count("hidden_size_per_layer_input")
    if not size:
        return ABSENT
    return PerLayerEmbedding(size, num_layers, keys.positive("vocab_size_per_layer_input"), activation)
