"""Llama 2 and 3 (and models published in their form)."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap

LLAMA = Family(
    title="Llama 2 and 3",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES}),
)
