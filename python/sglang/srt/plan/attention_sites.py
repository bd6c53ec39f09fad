"""The attention sites of a model: the kinds of attention calls for which a backend plans every step."""

from __future__ import annotations

from sglang.srt.plan.layer_spec import AttentionSite, Mixer
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription


def attention_sites(model: ModelDescription, tp_size: int, dcp_size: int = 1) -> tuple[AttentionSite, ...]:
    """Returns the attention sites of one rank, each once, in the order of the layers."""
    sites = (site_of(layer.mixer, tp_size, dcp_size) for layer in model.layers)
    return tuple(dict.fromkeys(site for site in sites if site is not None))


def site_of(mixer: Mixer, tp_size: int, dcp_size: int) -> AttentionSite | None:
    """Returns the attention site of a mixer; None: the mixer has no attention over a cache that a backend plans."""
    shape = mixer.attention_shape(tp_size)
    if shape is None:
        return None
    assert isinstance(mixer, GQA | MLA), "other mixers have no attention over a cache"
    window, chunked = (mixer.window, mixer.chunked) if isinstance(mixer, GQA) else (0, False)
    return AttentionSite(shape, window, mixer.top_k, mixer.effective_dcp_size(tp_size, dcp_size), chunked)
