"""Reads the encoder of images of DeepSeek-V4's vision edition from config.json, where its keys stand beside the text's.

The encoder is V4.1's. Its tokens are arranged for compressed attention, whose entries are of 4 tokens: an entry is of a
square of 2 x 2 tokens, so an image begins at a multiple of 4, and rows come in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.towers.base.spec import NamedShape
from sglang.srt.towers.deepseek_v41.spec import DeepseekVitTower, describe_vit

PAD = "image_pad"
"""Name of the learned token that fills what is before an image, and an odd row."""
ALIGNED = 4
"""The first token of an image's rows stands at a multiple of it."""
FILL = ALIGNED - 1
"""Tokens before an image's first mark where it begins at such a multiple."""
_KEYS = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
"""The keys of V4.1's `vision_config`, and the names that they have here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRowsTower(DeepseekVitTower):
    """V4.1's encoder whose tokens stand in pairs of rows. `max_tokens`: of an image."""

    max_tokens: int
    prefixes: ClassVar[tuple[str, ...]] = (*DeepseekVitTower.prefixes, PAD)

    @property
    def longest_run(self) -> int:
        return self.max_tokens

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * (FILL + paired_tokens(*self.squares(grid)))

    def shapes(self) -> Iterator[NamedShape]:
        yield from super(PairedRowsTower, self).shapes()
        yield PAD, (self.out_size,)


def paired_tokens(rows: int, columns: int) -> int:
    """Returns the tokens of an image from its first mark to its last: pairs of rows, each with a token that ends it,
    filled up to a multiple of 4."""
    inside = 2 * -(-rows // 2) * (columns + 1)
    return 2 + inside + inside % ALIGNED


def flat_keys(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the keys of a config's encoder by V4.1's names; None without an encoder."""
    keys = {theirs: config[name] for theirs, name in _KEYS.items() if config.get(name) is not None}
    return keys if keys.get("num_hidden_layers") else None


def describe_paired_rows(outer: ConfigReader, vision: ConfigReader) -> PairedRowsTower:
    """Describes the encoder of a config. Raises UserError for a missing key."""
    vision.positive("min_pixels")  # read by the processor, which has no default for it
    keys = describe_vit(vision, outer.positive("hidden_size"))
    return PairedRowsTower(**keys, max_tokens=vision.positive("max_image_tokens"))
