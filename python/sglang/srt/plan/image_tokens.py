"""Passes the image token's id to the blocks that treat image tokens differently (DeepSeek-V4.1)."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.plan.layer_spec import LayerSpec


def with_image_token(layer: LayerSpec, token: int) -> LayerSpec:
    """Returns the layer for a model that is served with images, whose placeholder is `token`."""
    ffn, ngrams = layer.ffn, layer.ngrams
    if (experts := ffn.experts) and experts.router.image_correction:
        layer = replace(layer, ffn=replace(experts, router=replace(experts.router, image_token=token)))
    if isinstance(ngrams, Engram):
        layer = replace(layer, ngrams=replace(ngrams, image_token=token))
    return layer
