"""Reads from config.json how a class of transformers takes images: its own modules encode them.

A token stands for a square of pixels, a cell. So a picture's pixels are divided evenly among its tokens, in the order
in which they lie in memory, and the encoder puts them together again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower

if TYPE_CHECKING:
    from typing import Self

ANY_SIZE = "pixtral"
"""Type of a vision_config whose images have any number of rows and columns of cells."""
_PATCHES_AT_ONCE = 4096
"""Most patches of the tiles that a call of the class encodes together; a larger tile is encoded by itself."""
_STREAMS = 16
"""Values of a patch that a layer holds at a time, in hidden sizes."""

_CELL_SIDES: Mapping[str, Callable[[ConfigReader], int]] = {
    "aya_vision": lambda outer: outer.positive("downsample_factor", 2),
    "idefics3": lambda outer: outer.positive("scale_factor", 2),
    "internvl": lambda outer: round(1 / max(outer.default("downsample_ratio", float, 0.5), 1e-3)),
    "lighton_ocr": lambda outer: outer.positive("spatial_merge_size", 2),
    "llava": lambda outer: 1,
    "mistral3": lambda outer: outer.positive("spatial_merge_size", 1),
    "smolvlm": lambda outer: outer.positive("scale_factor", 4),
}
"""Patches a side of a cell, by model type."""
MODEL_TYPES = tuple(_CELL_SIDES)
WITH_OTHER_TEXT = ("aya_vision",)
"""Those whose templates write another text for an image than its placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTower(Tower):
    """The modules of a class that encode images.

    patch, cell: pixels a side of a patch, and of what becomes one token
    tile: rows and columns of pixels of all tiles; None: an image is one tile of any size
    call_values: values that a call of the class holds at most
    tiles_at_once: tiles of one call
    in_lists: a call takes a list of images for each text, [texts, tiles, ...]
    tensors: (name in checkpoints, shape) of each weight; empty until the class has been asked
    """

    patch: int
    cell: int
    tile: tuple[int, int] | None
    call_values: int
    tiles_at_once: int = 1
    in_lists: bool = False
    tensors: tuple[NamedShape, ...] = ()
    can_pause: ClassVar[bool] = False
    cuts: ClassVar[Mapping[str, Cut]] = {}
    prefixes: ClassVar[tuple[str, ...]] = ()

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        return math.prod(grid)

    def shapes(self) -> Iterator[NamedShape]:
        yield from self.tensors

    def shared_by(self, ranks: int) -> Self:
        """Returns the encoder as it is: each rank has all of it."""
        return self

    def step_values(self, patches: int) -> int:
        return self.call_values


def describe_class_tower(outer: ConfigReader, vision: ConfigReader) -> ClassTower:
    """Describes the encoder of a config. Raises UserError for tiles that are no whole cells. Pixels behind the last
    whole patch of a tile are seen by nothing."""
    patch, side = _sides(vision, "patch_size")[0], _CELL_SIDES[str(outer.values.get("model_type"))](outer)
    height, width = (pixels // patch * patch for pixels in _sides(vision, "image_size"))
    cell, patches = patch * side, (height // patch) * (width // patch)
    any_size = vision.values.get("model_type") == ANY_SIZE
    if not any_size and (height % cell or width % cell or not height or not width):
        raise UserError(f"{vision.source}: {height} x {width} pixels are no squares of {cell} a side, one a token.")
    tiles = 1 if any_size else max(1, _PATCHES_AT_ONCE // patches)
    hidden, layers = vision.positive("hidden_size"), vision.positive("num_hidden_layers")
    kind = str(outer.values.get("model_type"))
    return ClassTower(
        hidden_size=0,
        intermediate_size=0,
        num_layers=1,
        num_heads=1,
        patch_shape=(vision.positive("num_channels", 3), 1, cell, cell),
        merge=1,
        out_size=ConfigReader(outer.default("text_config", dict, {}), "config.json text_config").count("hidden_size"),
        patch=patch,
        cell=cell,
        tile=None if any_size else (height, width),
        call_values=tiles * patches * hidden * (layers + _STREAMS) + (patches**2 if any_size else 0),
        tiles_at_once=tiles,
        in_lists=kind in ("idefics3", "smolvlm"),
    )


def _sides(vision: ConfigReader, key: str) -> tuple[int, int]:
    """Returns rows and columns that a config has as one number or as two."""
    value = vision.values.get(key)
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return value[0], value[1]
    side = vision.positive(key)
    return side, side
