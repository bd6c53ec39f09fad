"""The attention sites of a model: the kinds of attention calls for which a backend plans every step."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionSite
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int, dcp_size: int = 1) -> tuple[AttentionSite, ...]:
    """Returns the attention sites of one rank, each once, in the order of the layers."""
    sites = (layer.mixer.attention_site(tp_size, dcp_size) for layer in model.layers)
    return tuple(dict.fromkeys(site for site in sites if site is not None))
