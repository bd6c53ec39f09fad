"""Passes the image token's id to the blocks that treat image tokens differently (DeepSeek-V4.1)."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.layer_spec import LayerSpec


def with_image_token(layer: LayerSpec, token: int) -> LayerSpec:
    """Returns the layer for a model that is served with images, whose placeholder is `token`."""
    ffn, ngrams = layer.ffn.with_image_token(token), layer.ngrams.with_image_token(token)
    return replace(layer, ffn=ffn, ngrams=ngrams)
