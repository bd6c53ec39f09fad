"""Passes the image token's id to the blocks that treat image tokens differently (DeepSeek-V4.1)."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.engram import Engram
from sglang.srt.plan.feed_forward import MoE
from sglang.srt.plan.layer_spec import LayerSpec


def with_image_token(layer: LayerSpec, token: int) -> LayerSpec:
    """Returns the layer for a model that is served with images, whose placeholder is `token`."""
    ffn, ngrams = layer.ffn, layer.ngrams
    if isinstance(ffn, MoE) and ffn.router.image_correction:
        layer = replace(layer, ffn=replace(ffn, router=replace(ffn.router, image_token=token)))
    if isinstance(ngrams, Engram):
        layer = replace(layer, ngrams=replace(ngrams, image_token=token))
    return layer
