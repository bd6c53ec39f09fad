"""Reads Qwen2.5-VL's encoder of images and videos from config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower, gated_shapes, linear_shapes, only, whole_quarters

NORM_EPS, ROTARY_THETA = 1e-6, 10000.0
"""The values of every published model; configs do not state them."""
_PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2_5VLTower(Tower):
    """Qwen2.5-VL's encoder. `window`: tokens a side of the windows in which patches see each other; in the
    `full_layers` all patches of a frame do."""

    window: int
    full_layers: tuple[int, ...]
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.qkv": Cut.HEADS,
        ".attn.proj": Cut.COLUMNS,
        ".gate_proj": Cut.ROWS,
        ".up_proj": Cut.ROWS,
        ".down_proj": Cut.COLUMNS,
        ".merger.mlp.0": Cut.ROWS,
        ".merger.mlp.2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_PREFIX,)
    beginnings: ClassVar[tuple[tuple[str, str], ...]] = (("visual.", _PREFIX),)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield from linear_shapes(_PREFIX + "patch_embed.proj", hidden, self.patch_values, bias=False)
        for i in range(self.num_layers):
            block = f"{_PREFIX}blocks.{i}."
            yield f"{block}norm1.weight", (hidden,)
            yield f"{block}norm2.weight", (hidden,)
            yield from linear_shapes(block + "attn.qkv", 3 * hidden, hidden)
            yield from linear_shapes(block + "attn.proj", hidden, hidden)
            yield from gated_shapes(block + "mlp.", hidden, wide, bias=True)
        yield f"{_PREFIX}merger.ln_q.weight", (hidden,)
        merged = hidden * self.merge**2
        yield from linear_shapes(_PREFIX + "merger.mlp.0", merged, merged)
        yield from linear_shapes(_PREFIX + "merger.mlp.2", self.out_size, merged)

    def sees_whole_clips(self, layer: int) -> bool:
        return layer in self.full_layers

    def activation_size(self) -> int:
        return 2 * self.hidden_size + max(8 * self.hidden_size, 3 * self.intermediate_size) + self.place_size


def describe_qwen2_5_vl(outer: ConfigReader, vision: ConfigReader) -> Qwen2_5VLTower:
    """Describes the encoder of a vision_config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "hidden_act", "silu")
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_heads")
    whole_quarters(vision, hidden, heads)
    layers, patch, merge = (
        vision.positive("depth"),
        vision.positive("patch_size"),
        vision.positive("spatial_merge_size"),
    )
    full = tuple(vision.require("fullatt_block_indexes", list))
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in full):
        raise UserError(f"{vision.source}: fullatt_block_indexes {list(full)} must be layers of the {layers}.")
    window = vision.positive("window_size") // patch // merge
    if not window:
        raise UserError(f"{vision.source}: window_size is less than the {patch * merge} pixels of a token.")
    return Qwen2_5VLTower(
        hidden_size=hidden,
        intermediate_size=vision.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        # The older published configs call the channels `in_chans`.
        patch_shape=(
            vision.count("in_channels", "in_chans") or 3,
            vision.positive("temporal_patch_size", 2),
            patch,
            patch,
        ),
        merge=merge,
        out_size=vision.positive("out_hidden_size"),
        window=window,
        full_layers=full,
    )
