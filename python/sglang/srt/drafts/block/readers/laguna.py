"""Reads Laguna's DFlash drafts: layers of Laguna without experts, a norm for each layer of aux hidden states, and
blocks whose rows see those before them.

Source: the format in which Poolside publishes them (`DFlashLagunaForCausalLM`). q, k and v are one tensor, [q; k; v].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.plan.attention_parts import HeadGate, PerHead, StoredQKV
from sglang.srt.plan.families.attention import attention_by_layer, grouped_attention
from sglang.srt.plan.families.blocks import mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Model, layers_of

if TYPE_CHECKING:
    from sglang.srt.blocks.gqa.spec import GQA
    from sglang.srt.drafts.config import DraftConfig
    from sglang.srt.plan.weight_names import WeightMap

LAGUNA_ARCHITECTURE = "DFlashLagunaForCausalLM"
ANCHOR = "sample_from_anchor"
"""Key that says whether the last sampled token's row makes the first draft token; if not, the row behind it does."""
_SPLIT = "draft_projections_apart"
"""Key by which `as_stored` tells `laguna_layers` that the checkpoint has q, k and v apart."""


def with_laguna_names(names: WeightMap, num_aux_layers: int) -> WeightMap:
    """Returns the names with those of the norms of aux hidden states, and of the gates."""
    norms = {name: name for name in (f"aux_hidden_norms.{i}" for i in range(num_aux_layers))}
    return replace(names, model={**names.model, **norms}, layer={**names.layer, "attn.head_gate": "self_attn.g_proj"})


def as_stored(config: DraftConfig, names: WeightMap) -> Mapping[str, Any]:
    """Returns the draft's config.json with whether its checkpoint has q, k and v apart."""
    stored = config.stored(names) or {}
    return {**config.values, _SPLIT: any(name.endswith(".q_proj.weight") for name in stored)}


def laguna_layers(c: Config) -> Model:
    """Reads the layers, none of which has experts."""
    c.only("gating", True, "per-head")
    c.only("attention_bias", False)
    attention = partial(grouped_attention, head_dim=128, qk_norm=PerHead(), gate=HeadGate(softplus=True))
    mixers: list[Any] = attention_by_layer(c, attention)
    if not c.default(_SPLIT, bool, False):
        mixers = [_fused(mixer) for mixer in mixers]
    return Model(c, layers_of(mixers, [mlp(c)] * len(mixers)))


def _fused(mixer: GQA) -> GQA:
    return replace(mixer, stored=StoredQKV(tp_blocks=1))
