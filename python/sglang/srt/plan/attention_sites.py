"""The attention sites of a model: the kinds of attention calls that a backend which plans every step has to plan."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite, Mixer
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int, dcp_size: int = 1) -> tuple[AttentionSite, ...]:
    """Returns each attention site of one rank once, in the order of the layers."""
    sites: dict[AttentionSite, None] = {}
    for mixer in (layer.mixer for layer in model.layers):
        shape = mixer.attention_shape(tp_size)
        if shape is not None:
            sites[site_of(mixer, shape, tp_size, dcp_size)] = None
    return tuple(sites)


def site_of(mixer: Mixer, shape: AttentionShape, tp_size: int, dcp_size: int) -> AttentionSite:
    """Returns the site of the layers of a mixer, which attends with heads of this shape."""
    assert isinstance(mixer, GQA | MLA), "other mixers have no attention over a cache"
    window = mixer.window if isinstance(mixer, GQA) else 0
    top_k = mixer.top_k if isinstance(mixer, MLA) else 0
    return AttentionSite(shape, window, top_k, mixer.token_ranks(tp_size, dcp_size))
