"""Step-3.7's tiles: sizes and numbers are those of the class of transformers 5.23."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from media.pictures import picture
from sglang.srt.managers.front.media.decoding import MediaError
from sglang.srt.managers.front.media.image_views import image_views
from sglang.srt.managers.front.media.processor_files import ProcessorFiles
from sglang.srt.managers.front.media.tiles import MAX_TILES, tiling

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
