"""Reads the encoder of images and videos of GLM-4.1V, GLM-4.5V and GLM-4.6V from config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import (
    ROTARY_THETA,
    Cut,
    NamedShape,
    Tower,
    gated_shapes,
    linear_shapes,
    norm_shapes,
    only,
    whole_quarters,
)

_PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vTower(Tower):
    """GLM's encoder.

    intermediate_size: width of the merger; block_size: width of the layers
    side: learned positions a side, which are interpolated to an image's size; 0: none, and no norm of embedded
        patches
    norm_eps: epsilon of the RMS norms
    qkv_bias, block_bias: biases of q, k and v, and of a block's other linear layers
    head_norms: each head of queries and keys is normed
    limit: clamps gates from above, and what they multiply from both sides; 0: no limit
    theta: base of the rotary angles
    """

    block_size: int
    side: int
    norm_eps: float
    qkv_bias: bool
    block_bias: bool = False
    head_norms: bool = False
    limit: float = 0.0
    theta: float = ROTARY_THETA
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.qkv": Cut.HEADS,
        ".attn.proj": Cut.COLUMNS,
        ".gate_proj": Cut.ROWS,
        ".up_proj": Cut.ROWS,
        ".down_proj": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, out = self.hidden_size, self.out_size
        yield from linear_shapes(_PREFIX + "patch_embed.proj", hidden, self.patch_values)
        if self.side:
            yield f"{_PREFIX}embeddings.position_embedding.weight", (self.side**2, hidden)
            yield f"{_PREFIX}post_conv_layernorm.weight", (hidden,)
        for i in range(self.num_layers):
            block = f"{_PREFIX}blocks.{i}."
            yield f"{block}norm1.weight", (hidden,)
            yield f"{block}norm2.weight", (hidden,)
            yield from linear_shapes(block + "attn.qkv", 3 * hidden, hidden, bias=self.qkv_bias)
            if self.head_norms:
                yield f"{block}attn.q_norm.weight", (self.head_dim,)
                yield f"{block}attn.k_norm.weight", (self.head_dim,)
            yield from linear_shapes(block + "attn.proj", hidden, hidden, bias=self.block_bias)
            yield from gated_shapes(block + "mlp.", hidden, self.block_size, bias=self.block_bias)
        yield f"{_PREFIX}post_layernorm.weight", (hidden,)
        yield f"{_PREFIX}downsample.weight", (out, hidden, self.merge, self.merge)
        yield f"{_PREFIX}downsample.bias", (out,)
        yield from linear_shapes(_PREFIX + "merger.proj", out, out, bias=False)
        yield from norm_shapes(_PREFIX + "merger.post_projection_norm", out)
        yield from gated_shapes(_PREFIX + "merger.", out, self.intermediate_size, bias=False)

    def activation_size(self) -> int:
        merged = (2 * self.out_size + 3 * self.intermediate_size) // self.merge**2
        return 2 * self.hidden_size + max(8 * self.hidden_size, 3 * self.block_size, merged) + self.place_size


def describe_glm4v(outer: ConfigReader, vision: ConfigReader) -> Glm4vTower:
    """Describes the encoder of a vision_config. Raises UserError for a missing key or a value that is not computed."""
    patch = vision.positive("patch_size", 14)
    return Glm4vTower(
        **usual_fields(vision),
        intermediate_size=vision.positive("intermediate_size"),
        block_size=vision.positive("out_hidden_size"),
        side=vision.positive("image_size", 336) // patch,
        qkv_bias=vision.default("attention_bias", bool, False),
    )


def usual_fields(vision: ConfigReader) -> dict[str, Any]:
    """Returns the fields that GLM-5.3-Flash reads in the same way."""
    only(vision, "hidden_act", "silu")
    hidden, heads = vision.positive("hidden_size"), vision.count("num_heads", "num_attention_heads")
    if not heads:
        raise UserError(f"{vision.source}: the key 'num_heads' is missing.")
    whole_quarters(vision, hidden, heads)
    patch = vision.positive("patch_size", 14)
    return {
        "hidden_size": hidden,
        "num_layers": vision.positive("depth"),
        "num_heads": heads,
        "patch_shape": (vision.positive("in_channels", 3), vision.positive("temporal_patch_size", 2), patch, patch),
        "merge": vision.positive("spatial_merge_size", 2),
        "out_size": vision.positive("out_hidden_size"),
        "norm_eps": vision.default("rms_norm_eps", float, 1e-5),
    }
