"""What a config.json is taken to mean, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.architectures import SUPPORTED_ARCHITECTURES
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.layers.mlp import Dense
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.moe.topk import Router
from sglang.srt.models.registry import MODEL_REGISTRY
from sglang.srt.plan.weights import weight_bytes
from sglang.srt.server_args import ServerArgs

from .harness import NativePlan

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3_0_6B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA_8B = QWEN3_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}
PUBLISHED_PARAMETERS = {  # as their model cards count them
    "Qwen3-8B": (QWEN3_8B, 8.19e9),
    "Qwen3-0.6B": (QWEN3_0_6B, 0.596e9),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.53e9),
    "Llama-3.1-8B": (LLAMA_8B, 8.03e9),
}


def _model(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_server_args(ServerArgs(model_path=str(folder)))


def test_the_registry_has_what_the_configuration_accepts() -> None:
    assert sorted(MODEL_REGISTRY) == sorted(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_planned_weight_bytes_are_those_allocated(name: str, tmp_path: Path) -> None:
    config, published = PUBLISHED_PARAMETERS[name]
    model = _model(config, tmp_path)
    built = MODEL_REGISTRY[model.architecture](NativePlan(model, context_len=16), device="meta")
    assert all(p.tensor.is_meta and p.tensor.dtype == torch.bfloat16 for p in built.params.values())
    assert weight_bytes(model, 1) == sum(p.tensor.nbytes for p in built.params.values())
    assert weight_bytes(model, 1) / 2 == pytest.approx(published, rel=0.005)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    config = QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    layers = MODEL_REGISTRY["Qwen3MoeForCausalLM"].describe(_model(config, tmp_path)).layers
    assert [type(layer.mlp) for layer in layers] == [Dense, MoE, Dense, Dense, Dense, MoE]
    assert layers[1].mlp == MoE(num_experts=128, intermediate_size=768, router=Router(top_k=8))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (QWEN3_8B, {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        (QWEN3_8B, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (QWEN3_8B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
        (QWEN3_8B, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        (QWEN3_8B, {"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        (LLAMA_8B, {"mlp_bias": "yes"}, "'mlp_bias' must be of type bool"),
        (QWEN3_30B_A3B, {"norm_topk_prob": 3}, "'norm_topk_prob' must be of type bool"),
    ],
)
def test_values_that_we_do_not_compute_are_refused(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = _model(base | change, tmp_path)
    with pytest.raises(UserError, match=message):
        MODEL_REGISTRY[model.architecture].describe(model)
