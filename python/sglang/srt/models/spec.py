"""What a decoder-only model is made of: one frozen description, read once from its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.layers.attention_block import GQA
from sglang.srt.layers.mlp import Dense
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.rotary_embedding import rope_spec

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: norm, attention, norm, feed-forward, each pair on the residual stream."""

    attention: GQA
    mlp: Dense | MoE


@dataclass(frozen=True, slots=True)
class ModelSpec:
    vocab_size: int
    hidden_size: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]


def reader(model: ModelConfig) -> ConfigReader:
    """The keys that only the family knows."""
    return ConfigReader(model.hf_config, f"{model.model_path}/config.json")


def expect(model: ModelConfig, key: str, *allowed: object) -> None:
    """The key is absent, null, or one of the values that we compute. Raises UserError naming it."""
    value = model.hf_config.get(key)
    if value is not None and value not in allowed:
        raise UserError(
            f"{model.model_path}/config.json: {key} = {value!r} is not supported for {model.architecture}; "
            f"supported: {', '.join(repr(a) for a in allowed)}."
        )


def decoder(model: ModelConfig, layers: Sequence[LayerSpec]) -> ModelSpec:
    """The facts that every family states with the same keys."""
    expect(model, "hidden_act", "silu")
    expect(model, "attention_dropout", 0)
    return ModelSpec(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        norm_eps=reader(model).require("rms_norm_eps", float),
        tie_embeddings=model.tie_word_embeddings,
        layers=tuple(layers),
    )


def grouped_query_attention(model: ModelConfig, qk_norm: bool) -> GQA:
    """GQA from the usual keys; `attention_bias` gives all four projections a bias."""
    bias = reader(model).default("attention_bias", bool, False)
    return GQA(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope=rope_spec(model.hf_config, model.head_dim),
        qk_norm=qk_norm,
        qkv_bias=bias,
        o_bias=bias,
    )
