"""Qwen3 and Qwen3-VL, dense and MoE: norms on the q and k heads, whose size is independent of the hidden size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.attention_parts import PerHead
from sglang.srt.plan.families.attention import attention_by_layer, check_windows, grouped_attention
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.mtp import QWEN_MTP
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.weight_names import ATTENTION_NAMES, EXPERT_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES}


def qwen3(c: Config) -> Model:
    return Model(c, layers_of(_mixers(c, head_dim=128, kv_heads=32), [mlp(c)] * c.num_layers))


def qwen3_moe(c: Config, *, renormalize: bool = False, expert_form: str = "") -> Model:
    """`renormalize`: unless `norm_topk_prob` says it."""
    router = Router(0, renormalize=renormalize)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, form=expert_form))
    return Model(c, layers_of(_mixers(c, kv_heads=4), blocks))


def _mixers(c: Config, head_dim: int = 0, *, kv_heads: int) -> list[Mixer]:
    check_windows(c)
    c.only("use_qk_norm", True)
    attention = partial(grouped_attention, qk_norm=PerHead(), head_dim=head_dim, kv_heads=kv_heads)
    return attention_by_layer(c, attention)


QWEN3 = Family(
    title="Qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    read=qwen3,
    names=WeightMap(MODEL_NAMES, _LAYER),
)
QWEN3_MOE = Family(
    title="Qwen3",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    read=qwen3_moe,
    names=WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES}, unread=("mtp.",)),
    mtp=QWEN_MTP,
)
QWEN3_VL = replace(
    QWEN3,
    title="Qwen3-VL",
    model_types=("qwen3_vl",),
    architectures=("Qwen3VLForConditionalGeneration",),
    names=replace(QWEN3.names.below("model.language_model."), unread=("model.visual.",)),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    title="Qwen3-VL",
    model_types=("qwen3_vl_moe",),
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    read=partial(qwen3_moe, renormalize=True, expert_form="stacked_columns"),
    names=replace(
        WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES, "moe.experts": "mlp.experts"}).below("model.language_model."),
        unread=("model.visual.",),
    ),
    mtp=None,
)
