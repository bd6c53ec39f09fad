"""Pictures for encoders that a class of transformers computes, prepared by its image processor.

The texts around runs of placeholders are those of the processors of transformers 5.17, which need torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.merged import transformers_class
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import Patches, Settings
from sglang.srt.towers.pictures.processor import Processor, Views
from sglang.srt.towers.pictures.video import MediaError
from sglang.srt.towers.transformers_class.spec import ANY_SIZE, describe_class_tower

_CLASSES = {
    "CLIPImageProcessor": "clip",
    "GotOcr2ImageProcessor": "got_ocr2",
    "Idefics3ImageProcessor": "idefics3",
    "PixtralImageProcessor": "pixtral",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Folder in transformers of each image processor that can prepare pictures here."""
_FORM, _SIDES, _ANY_SIZE = _OURS = ("prompt_form", "sides", "any_size")
"""Settings that config.json adds to those of the processor's file."""

Written = tuple[tuple[int, int, int], list[str | int]]
"""A grid of runs, rows and columns of cells, and the parts of the prompt."""


def _one_run(tiles: int, rows: int, columns: int, more: Mapping[str, Any]) -> Written:
    return (1, tiles * rows, columns), [tiles * rows * columns]


def _between_marks(tiles: int, rows: int, columns: int, more: Mapping[str, Any]) -> Written:
    grid, (run,) = _one_run(tiles, rows, columns, more)
    return grid, ["<img>", run, "</img>"]


def _line_by_line(tiles: int, rows: int, columns: int, more: Mapping[str, Any]) -> Written:
    ends = ["[IMG_BREAK]"] * (rows - 1) + ["[IMG_END]"]
    return (rows, 1, columns), [part for end in ends for part in (columns, end)]


def _numbered_tiles(tiles: int, rows: int, columns: int, more: Mapping[str, Any]) -> Written:
    """Writes the number of each tile before its run, and the whole picture last."""
    texts = [*(f"TILE_{number}" for number in range(1, tiles)), "TILE_GLOBAL"]
    texts[0] = f"<|START_OF_IMG|>{texts[0]}"
    return (tiles, rows, columns), [part for text in texts for part in (text, rows * columns)] + ["<|END_OF_IMG|>"]


def _tile_by_tile(tiles: int, rows: int, columns: int, more: Mapping[str, Any]) -> Written:
    """Writes the place of each tile before its run, and the whole picture last."""
    down, across, fake = more["rows"][0][0], more["cols"][0][0], "<fake_token_around_image>"
    texts = [f"{fake}<row_{row + 1}_col_{column + 1}>" for row in range(down) for column in range(across)]
    for row in range(1, down):
        texts[row * across] = f"\n{texts[row * across]}"
    texts.append(f"\n\n{fake}<global-img>" if texts else f"{fake}<global-img>")
    assert len(texts) == tiles, "one tile for each place, and the whole picture"
    return (tiles, rows, columns), [part for text in texts for part in (text, rows * columns)] + [fake]


_BY_ROWS = "rows"
"""Form of images of any size, with a run for each row."""
_FORMS: Mapping[str, tuple[Callable[..., Written], Mapping[str, Any]]] = {
    "aya_vision": (_numbered_tiles, {"crop_to_patches": True}),
    "idefics3": (_tile_by_tile, {"return_row_col_info": True}),
    "internvl": (_between_marks, {"crop_to_patches": True}),
    "lighton_ocr": (_one_run, {}),
    "llava": (_one_run, {}),
    _BY_ROWS: (_line_by_line, {}),
    "smolvlm": (_tile_by_tile, {"return_row_col_info": True}),
}
"""How prompts show an image, and what is asked of the image processor, by the form's name."""


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    vision = ConfigReader(config["vision_config"], "config.json vision_config")
    tower, kind = describe_class_tower(ConfigReader(config, "config.json"), vision), str(config.get("model_type"))
    by_rows = vision.values.get("model_type") == ANY_SIZE and kind != "lighton_ocr"
    return {_FORM: _BY_ROWS if by_rows else kind, _SIDES: (tower.patch, tower.cell), _ANY_SIZE: tower.tile is None}


def _class_of(settings: Settings) -> str:
    return str(settings.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")


def _check(settings: Settings) -> None:
    if _class_of(settings) not in _CLASSES:
        raise UserError(
            f"pictures cannot be prepared by {settings.get('image_processor_type')!r} here, only by"
            f" {', '.join(_CLASSES)}; --language-model-only serves text alone."
        )


def _by_its_class(settings: Settings, dtype: str) -> Callable[[Image.Image], Views]:
    (patch, cell), name = settings[_SIDES], _class_of(settings)
    write, asked = _FORMS[settings[_FORM]]
    kept = {key: value for key, value in settings.items() if key not in _OURS}
    if settings[_ANY_SIZE]:  # the picture has whole cells
        kept["patch_size"] = {"height": cell, "width": cell}
    folder = _CLASSES[name]
    processor = transformers_class(f"{folder}.image_processing_pil_{folder}", f"{name}Pil", kept)

    def see(image: Image.Image) -> Views:
        prepared = processor(image, return_tensors="np", **asked)
        pixels = np.asarray(prepared["pixel_values"], np.float32)
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
        height, width = (side // patch * patch for side in pixels.shape[-2:])
        if height % cell or width % cell:
            raise MediaError(f"a picture becomes {height} x {width} pixels, which are no whole tokens")
        pixels, tiles = pixels[..., :height, :width], len(pixels)
        grid, parts = write(tiles, height // cell, width // cell, prepared)
        tokens = sum(part for part in parts if isinstance(part, int))
        if tokens > PATCHES_A_STEP:
            raise MediaError(f"an image has {tokens} tokens, and {PATCHES_A_STEP} are the most; send a smaller one")
        return Views([Patches(as_type(pixels.reshape(tokens, -1), dtype), grid, tokens)], parts)

    return see


PROCESSOR = Processor(views=_by_its_class, check=_check, of_config=_of_config)
