"""Tiles of Step-3.7 and of Llama 4: sizes and numbers are those of the classes of transformers 5.23 and 5.17."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from media.pictures import picture
from media.processing import image_views
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.llama4.processor import CanvasProcessor, best_canvas, canvases, size_on
from sglang.srt.towers.pictures.processor_files import ProcessorFiles
from sglang.srt.towers.pictures.video import MediaError
from sglang.srt.towers.step3p7.processor import MAX_TILES, tiling

SEE = image_views(ProcessorFiles("step3p7", {}, {}), "float32")


@pytest.mark.parametrize(
    ("size", "tiles"),
    [((96, 64), 0), ((200, 120), 2), ((600, 350), 2), ((728, 400), 2), ((730, 730), 4), ((1280, 720), 6)]
    + [((50, 700), 14), ((20, 500), 0), ((1000, 9), 4), ((1100, 240), 5), ((2000, 470), 5)],
)
def test_views_of_a_picture(size: tuple[int, int], tiles: int) -> None:
    views = SEE(picture(*size))
    assert [patches.grid for patches in views.patches] == [*([(tiles, 36, 36)] if tiles else []), (1, 52, 52)]
    assert [part for part in views.parts if isinstance(part, int)] == [81] * tiles + [169]
    assert all(len(patches.pixels) == np.prod(patches.grid) for patches in views.patches)


def test_marks_around_tiles() -> None:
    tile = ["<patch_start>", 81, "<patch_end>"]
    assert SEE(picture(730, 730)).parts == [
        *tile,
        *tile,
        "<patch_newline>",
        *tile,
        *tile,
        "<im_start>",
        169,
        "<im_end>",
    ]


def test_a_narrow_strip_is_put_on_black() -> None:
    views = SEE(Image.new("RGB", (120, 10), "white"))
    whole = views.patches[-1].pixels.reshape(52, 52, 3, 14, 14)
    assert (whole[0, :, 0] > 1).all() and (whole[8:, :, 0] < -1).all()


def test_a_long_strip_takes_no_more_memory_than_the_largest_square() -> None:
    assert SEE(Image.new("RGB", (60000, 20), "white")).patches[0].grid == (36, 36, 36)


def test_too_many_tiles_are_refused() -> None:
    assert tiling((3024, 64), 728, 504).columns == 48
    with pytest.raises(MediaError, match=f"in 95 tiles; {MAX_TILES} are the limit"):
        tiling((3024, 32), 728, 504)


# --- Llama 4 ----------------------------------------------------------------------------------------------------------

LARGEST = {"resize_to_max_canvas": 1}


@pytest.mark.parametrize(
    ("size", "settings", "shape"),
    [((200, 120), {}, (1, 1)), ((336, 336), {}, (1, 1)), ((337, 336), {}, (1, 2)), ((1280, 720), {}, (3, 4))]
    + [((50, 700), {}, (3, 1)), ((1000, 9), {}, (1, 3)), ((3100, 900), {}, (2, 7)), ((1920, 1080), {}, (3, 5))]
    + [((4000, 4000), {}, (4, 4)), ((5000, 3), {"max_patches": 5}, (1, 5)), ((671, 1000), {"max_patches": 5}, (2, 2))]
    + [((200, 120), LARGEST, (3, 5)), ((100, 100), LARGEST, (4, 4)), ((672, 336), LARGEST, (3, 5))],
)
def test_canvases_of_llama4(size: tuple[int, int], settings: dict[str, int], shape: tuple[int, int]) -> None:
    assert best_canvas(size, 336, canvases(settings.get("max_patches", 16)), settings == LARGEST) == shape


@pytest.mark.parametrize(("size", "shape"), [((200, 120), (1, 1)), ((500, 400), (2, 2)), ((20, 500), (2, 1))])
def test_patches_of_tiles(size: tuple[int, int], shape: tuple[int, int]) -> None:
    got, patches = CanvasProcessor({}, "float32")(picture(*size))
    tiles = shape[0] * shape[1] + (shape != (1, 1))
    assert got == shape and patches.grid == (tiles, 24, 24) and patches.num_tokens == 144 * tiles
    assert len(patches.pixels) == tiles * 24**2


@pytest.mark.parametrize(
    ("size", "shape", "want"),
    [((200, 120), (1, 1), (336, 201)), ((1280, 720), (3, 4), (1280, 720)), ((1280, 720), (2, 2), (672, 377))]
    + [((50, 700), (3, 1), (50, 700)), ((5000, 3), (1, 5), (1680, 1)), ((30, 20), (1, 1), (336, 224))],
)
def test_sizes_on_a_canvas(size: tuple[int, int], shape: tuple[int, int], want: tuple[int, int]) -> None:
    """Where a picture is made smaller, in float32: 1280 x 720 becomes one row less than 378."""
    assert size_on(size, 336, shape, False) == want


def test_marks_around_tiles_of_llama4() -> None:
    see = image_views(ProcessorFiles("llama4", {}, {}), "float32")
    row = [144, "<|tile_x_separator|>", 144, "<|tile_y_separator|>"]
    whole = ["<|image|>", 144, "<|image_end|>"]
    assert see(picture(500, 500)).parts == ["<|image_start|>", *row, *row, *whole]
    assert see(picture(100, 500)).parts[:3] == ["<|image_start|>", 144, "<|tile_y_separator|>"]
    assert see(picture(100, 100)).parts == ["<|image_start|>", *whole]


def test_tiles_lie_on_black_and_the_whole_comes_last() -> None:
    """Levels have the values of bfloat16, as the class computes them."""
    _, patches = CanvasProcessor({}, "float32")(Image.new("RGB", (400, 100), (255, 64, 0)))
    tiles = patches.pixels.reshape(3, 24, 24, 3, 14, 14).transpose(0, 3, 1, 4, 2, 5).reshape(3, 3, 336, 336)
    assert (tiles[0, 0, :84] == 1).all() and (tiles[0, 0, 100:] == -1).all() and (tiles[1, 0, :, 64:] == -1).all()
    assert (tiles[2, 0] == 1).all() and (tiles[2, 1] == -0.49609375).all() and (tiles[2, 2] == -1).all()


def test_tiles_of_llama4_fit_an_encoder_step() -> None:
    _, patches = CanvasProcessor({"max_patches": 100} | LARGEST, "float32")(picture(1000, 1000))
    assert PATCHES_A_STEP * 3 // 4 < len(patches.pixels) <= PATCHES_A_STEP
    assert len(canvases(16)) == len(set(canvases(16))) == 50
    for size in ({"height": 330, "width": 330}, {"height": 336, "width": 672}, {"longest_edge": 336}):
        with pytest.raises(MediaError, match="no squares of whole tokens"):
            CanvasProcessor({"size": size}, "float32")
    with pytest.raises(MediaError, match="more patches than an encoder step"):
        CanvasProcessor({"size": {"height": 1792, "width": 1792}}, "float32")
