"""GLM-4 of 2025 and GLM-Z1, dense: norms before and after every block; half of a head rotates, neighbouring dims
together; gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap

_NORMS_AFTER = {"input_norm_after": "post_self_attn_layernorm", "mlp_norm_after": "post_mlp_layernorm"}

GLM4 = Family(
    title="GLM-4 of 2025 and GLM-Z1",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {**ATTENTION_NAMES, **MLP_NAMES, **_NORMS_AFTER},
        parts={"gate": "gate_up", "up": "gate_up"},
    ),
    residual=Sum(norms_after=True),
    o_bias=False,
    is_neox_style=False,
    joined_gate_up=True,
)
GLM4V = replace(
    GLM4,
    title="GLM-4.1V and GLM-4.6V-Flash",
    model_types=("glm4v",),
    architectures=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    names=replace(GLM4.names.below("model.language_model."), unread=("model.visual.",)),
    qkv_bias=True,
)
"""GLM-4.1V and GLM-4.6V-Flash."""
