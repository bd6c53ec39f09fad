"""The families of models, each a declaration. `sglang.srt.plan.model_description` reads configs with them."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.plan.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    KIMI_K25,
)
from sglang.srt.plan.families.deepseek_v4 import DEEPSEEK_V4
from sglang.srt.plan.families.deepseek_v41 import DEEPSEEK_V41
from sglang.srt.plan.families.dots3 import DOTS3
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.gemma3 import GEMMA3, GEMMA3_TEXT
from sglang.srt.plan.families.gemma4 import GEMMA4, GEMMA4_TEXT
from sglang.srt.plan.families.glm4 import GLM4, GLM4V
from sglang.srt.plan.families.glm4_moe import GLM4_MOE, GLM4V_MOE
from sglang.srt.plan.families.glm5_next import GLM5_NEXT
from sglang.srt.plan.families.gpt_oss import GPT_OSS
from sglang.srt.plan.families.hy_v3 import HY_V3
from sglang.srt.plan.families.hy_v4 import HY_V4, HY_V4_VL
from sglang.srt.plan.families.inkling import INKLING
from sglang.srt.plan.families.kimi_linear import KIMI_LINEAR
from sglang.srt.plan.families.laguna import LAGUNA
from sglang.srt.plan.families.ling3 import LING3
from sglang.srt.plan.families.llama import LLAMA
from sglang.srt.plan.families.llama4 import LLAMA4, LLAMA4_TEXT
from sglang.srt.plan.families.mimo_v2 import MIMO_V2
from sglang.srt.plan.families.minimax_m2 import MINIMAX_M2
from sglang.srt.plan.families.minimax_m3 import MINIMAX_M3
from sglang.srt.plan.families.mistral import MINISTRAL3, MISTRAL, MISTRAL3, MISTRAL4, MISTRAL4_TEXT, MIXTRAL
from sglang.srt.plan.families.muse_glimmer import MUSE_GLIMMER
from sglang.srt.plan.families.muse_spark import MUSE_SPARK
from sglang.srt.plan.families.naive_n05 import NAIVE_N05
from sglang.srt.plan.families.nemotron_h import NEMOTRON_H
from sglang.srt.plan.families.nemotron_h_puzzle import NEMOTRON_H_PUZZLE
from sglang.srt.plan.families.qwen2 import MIMO, QWEN2, QWEN2_5_VL, QWEN2_MOE
from sglang.srt.plan.families.qwen3 import QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE
from sglang.srt.plan.families.qwen3_8_next import QWEN4_EXP, QWEN4_EXP_TEXT
from sglang.srt.plan.families.qwen3_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from sglang.srt.plan.families.smollm3 import SMOLLM3
from sglang.srt.plan.families.step3 import STEP3P5, STEP3P7
from sglang.srt.plan.families.step5 import STEP5, STEP5_VL

FAMILIES: tuple[Family, ...] = (
    *(
        LLAMA,
        SMOLLM3,
        LLAMA4_TEXT,
        LLAMA4,
        MISTRAL,
        MINISTRAL3,
        MISTRAL4_TEXT,
        MISTRAL3,
        MISTRAL4,
        MIXTRAL,
        QWEN2,
        QWEN2_MOE,
        QWEN2_5_VL,
        MIMO,
        QWEN3,
        QWEN3_MOE,
        QWEN3_VL,
        QWEN3_VL_MOE,
    ),
    *(
        GLM4,
        GLM4V,
        GLM4_MOE,
        GLM4V_MOE,
        MINIMAX_M2,
        MINIMAX_M3,
        GPT_OSS,
        MIMO_V2,
        NAIVE_N05,
        HY_V3,
        HY_V4,
        HY_V4_VL,
        STEP3P5,
        STEP3P7,
        STEP5,
        STEP5_VL,
        MUSE_GLIMMER,
        MUSE_SPARK,
        LAGUNA,
        INKLING,
    ),
    *(GEMMA3, GEMMA3_TEXT, GEMMA4, GEMMA4_TEXT),
    *(DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA, KIMI_K25, DOTS3),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT),
    *(NEMOTRON_H, NEMOTRON_H_PUZZLE, KIMI_LINEAR, LING3, GLM5_NEXT),
    *(DEEPSEEK_V4, DEEPSEEK_V41, QWEN4_EXP, QWEN4_EXP_TEXT),
)

_BY_ARCHITECTURE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}

SERVED_ARCHITECTURES: tuple[str, ...] = tuple(sorted(_BY_ARCHITECTURE))
"""Values of config.json's `architectures` that are served."""


def family_of(architecture: str, model_type: str) -> Family | None:
    """Returns the family of a model; None: the model is unknown. The architecture counts first, and `model_type`
    decides where several families have it."""
    kind = model_type.removesuffix("_text")
    for family in FAMILIES:
        if architecture in family.architectures and kind in family.model_types:
            return family
    return _BY_ARCHITECTURE.get(architecture) or _BY_MODEL_TYPE.get(kind)
