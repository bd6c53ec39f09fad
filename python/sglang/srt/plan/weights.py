"""Bytes of a model's weights on one rank, known before anything is allocated. No torch.

Counts what `models/` allocates; a test holds the two together for every architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.hf_config import ConfigReader

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WITH_HEAD_NORMS = frozenset({"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})


def weight_bytes(model: ModelConfig, tp_size: int) -> int:
    """Bytes of one rank's parameters: exact for the unquantized models that are implemented, and for any other dense or
    softmax-routed model with grouped-query attention."""
    sparse = sparse_layers(model)
    vocab_rows = -(-model.vocab_size // tp_size)
    elements = vocab_rows * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    elements += model.hidden_size  # the final norm
    elements += len(sparse) * (_attention_elements(model, tp_size) + 2 * model.hidden_size)
    elements += sum(sparse) * _expert_elements(model, tp_size)
    elements += (len(sparse) - sum(sparse)) * _dense_elements(model, tp_size)
    return elements * _DTYPE_BYTES[model.dtype]


def sparse_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts: every `decoder_sparse_step`-th, but for those of `mlp_only_layers`."""
    keys = ConfigReader(model.hf_config, "config.json")
    step = keys.positive("decoder_sparse_step", 1)
    dense = keys.default("mlp_only_layers", list, [])
    has_experts = model.num_experts > 0
    return tuple(has_experts and i not in dense and (i + 1) % step == 0 for i in range(model.num_layers))


def _attention_elements(model: ModelConfig, tp_size: int) -> int:
    q = model.num_heads * model.head_dim // tp_size
    kv = max(model.num_kv_heads // tp_size, 1) * model.head_dim
    elements = (q + 2 * kv) * model.hidden_size + q * model.hidden_size
    if _flag(model, "attention_bias"):
        elements += q + 2 * kv + model.hidden_size
    if model.architecture in _WITH_HEAD_NORMS:
        elements += 2 * model.head_dim
    return elements


def _dense_elements(model: ModelConfig, tp_size: int) -> int:
    share = model.intermediate_size // tp_size
    elements = 3 * share * model.hidden_size
    return elements + 2 * share + model.hidden_size if _flag(model, "mlp_bias") else elements


def _expert_elements(model: ModelConfig, tp_size: int) -> int:
    share = model.moe_intermediate_size // tp_size
    return model.num_experts * model.hidden_size * (1 + 3 * share)


def _flag(model: ModelConfig, key: str) -> bool:
    return ConfigReader(model.hf_config, "config.json").default(key, bool, False)
