"""Reads the encoder of images and videos of Qwen3-VL, Qwen3.5 and Qwen3.8-Flash-Next from config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import (
    Cut,
    NamedShape,
    Tower,
    axial_theta,
    linear_shapes,
    norm_shapes,
    only,
    whole_quarters,
)

NORM_EPS = 1e-6
"""Epsilon of the norms in every published model; configs do not state it."""
_PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLTower(Tower):
    """Qwen3-VL's encoder. `side`: learned positions a side, which are interpolated to an image's size. `theta`: base of
    the rotary angles."""

    side: int
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.qkv": Cut.HEADS,
        ".attn.proj": Cut.COLUMNS,
        ".linear_fc1": Cut.ROWS,
        ".linear_fc2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield from linear_shapes(_PREFIX + "patch_embed.proj", hidden, self.patch_values)
        yield f"{_PREFIX}pos_embed.weight", (self.side**2, hidden)
        for i in range(self.num_layers):
            block = f"{_PREFIX}blocks.{i}."
            yield from norm_shapes(block + "norm1", hidden)
            yield from norm_shapes(block + "norm2", hidden)
            yield from linear_shapes(block + "attn.qkv", 3 * hidden, hidden)
            yield from linear_shapes(block + "attn.proj", hidden, hidden)
            yield from linear_shapes(block + "mlp.linear_fc1", wide, hidden)
            yield from linear_shapes(block + "mlp.linear_fc2", hidden, wide)
        merged = hidden * self.merge**2
        mergers = [("merger.", hidden), *((f"deepstack_merger_list.{i}.", merged) for i in range(len(self.deepstack)))]
        for name, norm in mergers:
            yield from norm_shapes(_PREFIX + name + "norm", norm)
            yield from linear_shapes(_PREFIX + name + "linear_fc1", merged, merged)
            yield from linear_shapes(_PREFIX + name + "linear_fc2", self.out_size, merged)


def describe_qwen3_vl(outer: ConfigReader, vision: ConfigReader) -> Qwen3VLTower:
    """Describes the encoder of a vision_config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "gelu_pytorch_tanh")
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_heads")
    whole_quarters(vision, hidden, heads)
    positions, layers = vision.positive("num_position_embeddings", 2304), vision.positive("depth")
    side = math.isqrt(positions)
    if side**2 != positions:
        raise UserError(f"{vision.source}: num_position_embeddings {positions} is not a square.")
    deepstack = tuple(vision.default("deepstack_visual_indexes", list, []))
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in deepstack):
        raise UserError(f"{vision.source}: deepstack_visual_indexes {list(deepstack)} must be layers of the {layers}.")
    patch = vision.positive("patch_size")
    return Qwen3VLTower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size", 4304),
        num_layers=layers,
        num_heads=heads,
        patch_shape=(vision.positive("in_channels", 3), vision.positive("temporal_patch_size", 2), patch, patch),
        merge=vision.positive("spatial_merge_size", 2),
        out_size=vision.positive("out_hidden_size"),
        side=side,
        theta=axial_theta(vision),
        deepstack=deepstack,
    )
