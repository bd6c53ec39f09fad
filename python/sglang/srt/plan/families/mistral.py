"""Mistral and Mixtral: every layer has a window where the config names one; experts of Mixtral are w1, w2, w3."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, W123_NAMES, W123_PARTS, WeightMap

MISTRAL = Family(
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
    num_kv_heads=8,
    windows_everywhere=True,
)
MIXTRAL = Family(
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **W123_NAMES}, parts=W123_PARTS),
    num_kv_heads=8,
    windows_everywhere=True,
    has_experts=True,
)
