"""A model of a family that is not known, read as most families write their configs, so that it can be planned for."""

from __future__ import annotations

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import (
    RECURRENT,
    check_windows,
    full_and_windowed,
    grouped_attention,
    layer_kinds,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import (
    EXPERT_COUNTS,
    experts,
    ffn_by_layer,
    gated_shared_expert,
    mlp,
    shared_experts,
    sparse_layers,
)
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Model, layers_of
from sglang.srt.plan.families.latent import indexed_layers, latent_attention
from sglang.srt.plan.families.recurrent import gated_delta
from sglang.srt.plan.layer_spec import Mixer


def usual_model(c: Config) -> Model:
    """Reads latent attention where the keys describe it, otherwise grouped heads by kind of layer; experts where there
    are some."""
    sparse = sparse_layers(c) if c.count(*EXPERT_COUNTS) else [False] * c.num_layers
    blocks = ffn_by_layer(
        sparse, lambda: mlp(c), lambda: experts(c, Router(0), shared=gated_shared_expert(c) or shared_experts(c))
    )
    return Model(c, layers_of(_mixers(c), blocks))


def unknown_model(c: Config) -> Model:
    """Reads a model that no family describes, as `usual_model` does. Raises UserError that also says so: a key that is
    missing may have another name in this model."""
    try:
        return usual_model(c)
    except UserError as error:
        raise UserError(
            f"{error} No family here has the architecture {c.architecture} or the model type"
            f" {c.values.get('model_type')!r}, so the usual keys were looked for."
        ) from None


def _mixers(c: Config) -> list[Mixer]:
    if c.count("kv_lora_rank"):
        return [latent_attention(c, has_indexer=has_indexer) for has_indexer in indexed_layers(c)]
    check_windows(c)
    kinds = full_and_windowed(grouped_attention) | {RECURRENT: gated_delta}
    return mixers_by_kind(c, layer_kinds(c), kinds)
