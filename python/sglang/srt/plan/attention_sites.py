"""The attention sites of a model: the kinds of attention calls that a backend which plans every step has to plan."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionSite, Mixer
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int, dcp_size: int = 1) -> tuple[AttentionSite, ...]:
    """Returns each attention site of one rank once, in the order of the layers."""
    sites = (site_of(layer.mixer, tp_size, dcp_size) for layer in model.layers)
    return tuple(dict.fromkeys(site for site in sites if site is not None))


def site_of(mixer: Mixer, tp_size: int, dcp_size: int) -> AttentionSite | None:
    """Returns the site of the layers of a mixer; None: there is no attention over a cache."""
    shape = mixer.attention_shape(tp_size)
    if shape is None:
        return None
    assert isinstance(mixer, GQA | MLA), "other mixers have no attention over a cache"
    window, chunked = (mixer.window, mixer.chunked) if isinstance(mixer, GQA) else (0, False)
    return AttentionSite(shape, window, mixer.top_k, mixer.effective_dcp_size(tp_size, dcp_size), chunked)
