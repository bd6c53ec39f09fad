"""The attention sites of a model: what a backend that plans every step plans each step."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionSite
from sglang.srt.plan.mixers import GQA
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int) -> tuple[AttentionSite, ...]:
    """Each once, in the order of the layers, on one rank."""
    sites: dict[AttentionSite, None] = {}
    for mixer in (layer.mixer for layer in model.layers):
        shape = mixer.attention_shape(tp_size)
        if shape is not None:
            sites[AttentionSite(shape, mixer.window if isinstance(mixer, GQA) else 0)] = None
    return tuple(sites)
