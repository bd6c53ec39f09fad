"""Reads DeepSeek-V4.1's encoder of images from config.json.

A token is made of a square of patches, padded at the edges of the image. A learned token ends each row of tokens, and
two others begin and end the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.towers.base.spec import ROTARY_THETA, Cut, NamedShape, Tower, linear_shapes, whole_quarters

TOWER, ALIGNER = "vision.", "aligner."
START, NEW_LINE, END = "image_start", "image_newline", "image_end"
"""Names of the learned tokens that are not made of patches."""
_COLOURS = 3
_NORM_EPS = 1e-6
"""Default epsilon; no published config states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekVitTower(Tower):
    """DeepSeek-V4.1's encoder. `norm_eps`: epsilon of all its norms, not the text's. `theta`: base of the angles by row
    and column."""

    norm_eps: float
    theta: float
    cuts: ClassVar[Mapping[str, Cut]] = {
        ".attn.wqkv": Cut.HEADS,
        ".attn.wo": Cut.COLUMNS,
        ".mlp.w1": Cut.GATED,
        ".mlp.w2": Cut.COLUMNS,
        "aligner.w1": Cut.ROWS,
        "aligner.w2": Cut.COLUMNS,
    }
    prefixes: ClassVar[tuple[str, ...]] = (TOWER, ALIGNER, START, NEW_LINE, END)

    def squares(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Returns the rows and columns of tokens that a frame's patches become."""
        return -(-grid[1] // self.merge), -(-grid[2] // self.merge)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        rows, columns = self.squares(grid)
        return grid[0] * (rows * (columns + 1) + 2)

    def shapes(self) -> Iterator[NamedShape]:
        hidden, wide = self.hidden_size, self.intermediate_size
        yield from linear_shapes(TOWER + "patch_embed.proj", hidden, self.patch_values)
        for i in range(self.num_layers):
            block = f"{TOWER}blocks.{i}."
            yield f"{block}norm1.weight", (hidden,)
            yield from linear_shapes(block + "attn.wqkv", 3 * hidden, hidden)
            yield from linear_shapes(block + "attn.wo", hidden, hidden)
            yield f"{block}norm2.weight", (hidden,)
            yield from linear_shapes(block + "mlp.w1", 2 * wide, hidden, bias=False)
            yield from linear_shapes(block + "mlp.w2", hidden, wide, bias=False)
        yield f"{TOWER}norm.weight", (hidden,)
        yield from linear_shapes(ALIGNER + "w1", self.out_size, hidden * self.merge**2)
        yield from linear_shapes(ALIGNER + "w2", self.out_size, self.out_size)
        for mark in (START, NEW_LINE, END):
            yield mark, (self.out_size,)


def describe_deepseek_vit(outer: ConfigReader, vision: ConfigReader) -> DeepseekVitTower:
    """Describes the encoder of a config. Raises UserError for a missing key."""
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    return DeepseekVitTower(**describe_vit(vision, text.positive("hidden_size")))


def describe_vit(vision: ConfigReader, out_size: int) -> dict[str, Any]:
    """Returns the fields of an encoder whose tokens have `out_size` dims. Raises UserError for a missing key."""
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_attention_heads")
    whole_quarters(vision, hidden, heads)
    patch = vision.positive("patch_size", 14)
    return {
        "hidden_size": hidden,
        "intermediate_size": vision.positive("intermediate_size"),
        "num_layers": vision.positive("num_hidden_layers"),
        "num_heads": heads,
        "patch_shape": (_COLOURS, 1, patch, patch),
        "merge": vision.positive("downsample_ratio", 3),
        "out_size": out_size,
        "norm_eps": vision.default("rms_norm_eps", float, _NORM_EPS),
        "theta": vision.default("rope_theta", float, ROTARY_THETA),
    }
