"""Bytes of a model's weights on one rank, known before anything is allocated. No torch.

Counts what `models/` allocates; a test holds the two together for every architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import SCALE_BYTES, expert_share

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WITH_HEAD_NORMS = frozenset({"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})


def weight_bytes(model: ModelConfig, tp_size: int, fp8_cache: bool = False) -> int:
    """Bytes of one rank's parameters: exact for the models that are implemented, and for any other dense or
    softmax-routed model with grouped-query attention. An `fp8_cache` has scales, which are parameters."""
    item = _DTYPE_BYTES[model.dtype]
    vocab_rows = -(-model.vocab_size // tp_size)
    elements = vocab_rows * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    elements += model.hidden_size  # the final norm
    total = elements * item
    for layer, sparse in enumerate(sparse_layers(model)):
        total += 2 * model.hidden_size * item
        total += _attention_bytes(model, layer, tp_size) + (8 if fp8_cache else 0)
        total += _expert_bytes(model, layer, tp_size) if sparse else _dense_bytes(model, layer, tp_size)
    return total


def linear_bytes(model: ModelConfig, modules: Sequence[str], rows: int, cols: int) -> int:
    """Of a weight [rows, cols] that the checkpoint holds as these modules, stacked: data and scales."""
    quant = model.quantization.of_fused(modules) if model.quantization is not None else None
    return matrix_bytes(quant, rows, cols, len(modules), _DTYPE_BYTES[model.dtype])


def matrix_bytes(quant: ModuleQuant | None, rows: int, cols: int, modules: int, item: int) -> int:
    """`modules`: how many the checkpoint has of it; `item`: bytes of an element that is not quantized."""
    if quant is None:
        return rows * cols * item
    scheme = quant.format
    whole = scheme.group[1] == 0  # one scale a matrix is repeated for every row
    scales = rows if whole else math.prod(scheme.scale_shape(rows, cols))
    data = rows * cols * scheme.bits // 8 + scales * SCALE_BYTES[scheme.scale]
    return data + (4 * rows if scheme.global_scale else 0) + (4 * modules if quant.static_input else 0)


def sparse_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    keys = ConfigReader(model.hf_config, "config.json")
    step = keys.positive("decoder_sparse_step", 1)
    dense = keys.default("mlp_only_layers", list, [])
    has_experts = model.num_experts > 0
    return tuple(has_experts and i not in dense and (i + 1) % step == 0 for i in range(model.num_layers))


def _attention_bytes(model: ModelConfig, layer: int, tp_size: int) -> int:
    item, prefix = _DTYPE_BYTES[model.dtype], f"model.layers.{layer}.self_attn."
    q = model.num_heads * model.head_dim // tp_size
    kv = max(model.num_kv_heads // tp_size, 1) * model.head_dim
    total = linear_bytes(model, [f"{prefix}{part}_proj" for part in "qkv"], q + 2 * kv, model.hidden_size)
    total += linear_bytes(model, [f"{prefix}o_proj"], model.hidden_size, q)
    if _flag(model, "attention_bias"):
        total += (q + 2 * kv + model.hidden_size) * item
    if model.architecture in _WITH_HEAD_NORMS:
        total += 2 * model.head_dim * item
    return total


def _dense_bytes(model: ModelConfig, layer: int, tp_size: int) -> int:
    share, prefix = model.intermediate_size // tp_size, f"model.layers.{layer}.mlp."
    total = linear_bytes(model, [f"{prefix}{part}_proj" for part in ("gate", "up")], 2 * share, model.hidden_size)
    total += linear_bytes(model, [f"{prefix}down_proj"], model.hidden_size, share)
    biases = 2 * share + model.hidden_size if _flag(model, "mlp_bias") else 0
    return total + biases * _DTYPE_BYTES[model.dtype]


def _expert_bytes(model: ModelConfig, layer: int, tp_size: int) -> int:
    """Router and routed experts of a layer: every expert's share with room for whole groups (`expert_share`)."""
    quant = None
    if model.quantization is not None:
        quant = model.quantization.of(f"model.layers.{layer}.mlp.experts.0.gate_proj")
    scheme = quant.format if quant is not None else None
    item, experts, hidden = _DTYPE_BYTES[model.dtype], model.num_experts, model.hidden_size
    share = expert_share(model.moe_intermediate_size, tp_size, scheme)
    total = experts * hidden * item
    for rows, cols, matrices in ((2 * share, hidden, 2), (hidden, share, 1)):
        if quant is None or scheme is None:
            total += experts * rows * cols * item
            continue
        scales = matrices if scheme.group == (0, 0) else math.prod(scheme.scale_shape(rows, cols))
        singles = 4 * matrices * (scheme.global_scale + quant.static_input)
        total += experts * (rows * cols * scheme.bits // 8 + scales * SCALE_BYTES[scheme.scale] + singles)
    return total


def _flag(model: ModelConfig, key: str) -> bool:
    return ConfigReader(model.hf_config, "config.json").default(key, bool, False)
