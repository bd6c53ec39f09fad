"""The attention sites of a model: the kinds of attention calls that a backend which plans every step has to plan."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionSite
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int) -> tuple[AttentionSite, ...]:
    """Returns each attention site of one rank once, in the order of the layers."""
    sites: dict[AttentionSite, None] = {}
    for mixer in (layer.mixer for layer in model.layers):
        shape = mixer.attention_shape(tp_size)
        if shape is not None:
            window = mixer.window if isinstance(mixer, GQA) else 0
            sites[AttentionSite(shape, window, mixer.top_k if isinstance(mixer, GQA | MLA) else 0)] = None
    return tuple(sites)
