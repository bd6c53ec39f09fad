"""Converts pictures to encoder inputs and prompt parts. Most models see a picture once, between marks that the template
writes; Step-3.7 and Llama 4 also see its tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PIL import Image

from sglang.srt.managers.front.media.canvas_tiles import CanvasProcessor
from sglang.srt.managers.front.media.processor_files import ProcessorFiles
from sglang.srt.managers.front.media.processors import Patches, image_processor
from sglang.srt.managers.front.media.tiles import TiledProcessor

_MARKS: Mapping[str, tuple[str, str]] = {
    "minimax_m3": ("]<]start of image[>[", "]<]end of image[>["),
    "muse_glimmer": ("<|image_start|>", "<|image_end|>"),
}
"""Tokens around a run of placeholders that the processor writes instead of the template."""


@dataclass(frozen=True, slots=True)
class Views:
    """`patches` of each grid, in the order of their placeholders. `parts`: prompt text; a number stands for a run of
    that many placeholders, one run for each frame of a grid."""

    patches: list[Patches]
    parts: list[str | int]


MakeViews = Callable[[Image.Image], Views]


def image_views(files: ProcessorFiles, dtype: str) -> MakeViews:
    """Returns the function that prepares the model's images, with patches of a type that `patch_types.as_type`
    names."""
    if files.family == "step3p7":
        return _in_tiles(TiledProcessor(files.image, dtype))
    if files.family == "llama4":
        return _on_a_canvas(CanvasProcessor(files.image, dtype))
    process, marks = image_processor(files, dtype), _MARKS.get(files.family)

    def see(image: Image.Image) -> Views:
        patches = process(image)
        parts: list[str | int] = [patches.num_tokens]
        return Views([patches], parts if marks is None else [marks[0], *parts, marks[1]])

    return see


def _in_tiles(process: TiledProcessor) -> MakeViews:
    """Returns the function for Step-3.7: each tile and the whole picture have a run between marks; another mark follows
    each row of tiles except the last."""

    def see(image: Image.Image) -> Views:
        tiles, patches = process(image)
        parts: list[str | int] = []
        for number in range(tiles.rows * tiles.columns):
            parts += ["<patch_start>", patches[0].num_tokens // patches[0].grid[0], "<patch_end>"]
            if (number + 1) % tiles.columns == 0 and number + 1 < tiles.rows * tiles.columns:
                parts.append("<patch_newline>")
        parts += ["<im_start>", patches[-1].num_tokens, "<im_end>"]
        return Views(patches, parts)

    return see


def _on_a_canvas(process: CanvasProcessor) -> MakeViews:
    """Returns the function for Llama 4: each tile has a run; one mark separates the tiles of a row, another follows
    each row, and one precedes the whole picture."""

    def see(image: Image.Image) -> Views:
        (rows, columns), patches = process(image)
        tokens = patches.num_tokens // patches.grid[0]
        parts: list[str | int] = ["<|image_start|>"]
        for _ in range(rows if patches.grid[0] > 1 else 0):
            between: list[str | int] = ["<|tile_x_separator|>", tokens]
            parts += [tokens, *between * (columns - 1), "<|tile_y_separator|>"]
        return Views([patches], [*parts, "<|image|>", tokens, "<|image_end|>"])

    return see
