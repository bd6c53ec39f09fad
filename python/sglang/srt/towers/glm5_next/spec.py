"""Reads the encoder of images and videos of GLM-5.3-Flash from config.json: `glm4v`'s in another form."""

from __future__ import annotations

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.towers.base.spec import axial_theta
from sglang.srt.towers.glm4v.spec import Glm4vTower, usual_fields


def describe_glm5_next(outer: ConfigReader, vision: ConfigReader) -> Glm4vTower:
    """Describes GLM-5.3-Flash's encoder as `describe_glm4v` does: no learned positions, but norms of heads, limits of
    gates and biases."""
    bias = vision.default("attention_bias", bool, True)
    return Glm4vTower(
        **usual_fields(vision),
        intermediate_size=vision.positive("projection_intermediate_size", 10240),
        block_size=vision.positive("intermediate_size"),
        side=0,
        qkv_bias=bias,
        block_bias=bias,
        head_norms=True,
        limit=vision.default("swiglu_limit", float, 10.0),
        theta=axial_theta(vision),
    )
