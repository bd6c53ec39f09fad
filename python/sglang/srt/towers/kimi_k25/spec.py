"""Reads MoonViT, the encoder of images and videos of Kimi K2.5 to K2.7, from config.json.

Published configs write `vt_hidden_size` and the like; those that transformers writes have the usual keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower, linear_shapes, norm_shapes, only, whole_quarters

ROTARY_THETA = 10000.0
"""Base of rotary angles in every published model; configs do not state it."""
_TOWER, _PROJECTOR = "vision_tower.", "mm_projector."
_COLOURS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonViTTower(Tower):
    """Kimi's encoder. `side`: learned positions a side, which are interpolated to an image's size. `projector_eps`:
    epsilon of the norm before the projector."""

    side: int
    projector_eps: float
    norm_eps: ClassVar[float] = 1e-5
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".wqkv": Cut.HEADS,
        ".wo": Cut.COLUMNS,
        ".mlp.fc0": Cut.ROWS,
        ".mlp.fc1": Cut.COLUMNS,
        "mm_projector.proj.0": Cut.ROWS,
        "mm_projector.proj.2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER, _PROJECTOR)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield from linear_shapes(_TOWER + "patch_embed.proj", hidden, self.patch_values)
        yield f"{_TOWER}patch_embed.pos_emb.weight", (self.side, self.side, hidden)
        for i in range(self.num_layers):
            block = f"{_TOWER}encoder.blocks.{i}."
            yield from norm_shapes(block + "norm0", hidden)
            yield from norm_shapes(block + "norm1", hidden)
            yield from linear_shapes(block + "wqkv", 3 * hidden, hidden)
            yield from linear_shapes(block + "wo", hidden, hidden)
            yield from linear_shapes(block + "mlp.fc0", wide, hidden)
            yield from linear_shapes(block + "mlp.fc1", hidden, wide)
        yield from norm_shapes(_TOWER + "encoder.final_layernorm", hidden)
        merged = hidden * self.merge**2
        yield from norm_shapes(_PROJECTOR + "pre_norm", hidden)
        yield from linear_shapes(_PROJECTOR + "proj.0", merged, merged)
        yield from linear_shapes(_PROJECTOR + "proj.2", self.out_size, merged)


def describe_moonvit(outer: ConfigReader, vision: ConfigReader) -> MoonViTTower:
    """Describes the encoder of a config. Raises UserError for a missing key or a value that is not computed."""
    only(vision, "merge_type", "sd2_tpool")
    only(vision, "mm_projector_type", "patchmerger")
    only(vision, "pos_emb_type", "divided_fixed")
    only(vision, "projector_hidden_act", "gelu")
    only(vision, "hidden_act", "gelu_pytorch_tanh")
    hidden, heads = _size(vision, "hidden_size"), _size(vision, "num_attention_heads")
    whole_quarters(vision, hidden, heads)
    side = _size(vision, "pos_emb_height", "init_")
    if side != _size(vision, "pos_emb_width", "init_"):
        raise UserError(f"{vision.source}: the learned positions are not a square.")
    squares = vision.default("merge_kernel_size", list, [2, 2])
    if len(squares) != 2 or squares[0] != squares[1] or not isinstance(squares[0], int) or squares[0] < 1:
        raise UserError(f"{vision.source}: merge_kernel_size {squares} is not a square.")
    text = outer.default("text_config", dict, {})
    patch = vision.positive("patch_size", 14)
    return MoonViTTower(
        hidden_size=hidden,
        intermediate_size=_size(vision, "intermediate_size"),
        num_layers=_size(vision, "num_hidden_layers"),
        num_heads=heads,
        patch_shape=(_COLOURS, 1, patch, patch),
        merge=squares[0],
        out_size=ConfigReader(text, "config.json text_config").positive("hidden_size"),
        side=side,
        clip_frames=(frames := _size(vision, "pos_emb_time", "init_")),
        pooled_frames=frames,
        projector_eps=vision.default(
            "projector_ln_eps", float, outer.default("projection_layer_norm_eps", float, 1e-5)
        ),
    )


def _size(vision: ConfigReader, key: str, prefix: str = "vt_") -> int:
    """Returns the whole number under the key, with or without the prefix. Raises UserError if there is none."""
    size = vision.count(prefix + key, key)
    if size < 1:
        raise UserError(f"{vision.source}: the key {prefix + key!r} is missing.")
    return size
