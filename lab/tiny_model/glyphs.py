"""Digits as coverages: those of the fonts that come with Pillow and matplotlib, and drawn by strokes of many widths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GLYPH_SIDE = 96
STROKE_WIDTHS = (0.07, 0.1, 0.14, 0.19)
Point = tuple[float, float]


@cache
def glyphs() -> Tensor:
    """[10, styles, GLYPH_SIDE, GLYPH_SIDE] float32, 0 to 1; a digit fills its square from top to bottom."""
    drawn = [_stroked(strokes, width) for strokes in _styles() for width in STROKE_WIDTHS]
    return torch.stack([*drawn, *_of_fonts()], dim=1)


# --- fonts ------------------------------------------------------------------------------------------------------------


def _of_fonts() -> Iterator[Tensor]:
    """Pillow's own font twice, as it is what most small pictures are written in."""
    from PIL import ImageFont

    own = ImageFont.load_default(GLYPH_SIDE)
    yield from (_written(own), _written(own))
    try:
        import matplotlib
    except ImportError:
        print("without matplotlib digits are of one font and of strokes", flush=True)
        return
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmss10"):
        if (folder / f"{name}.ttf").is_file():
            yield _written(ImageFont.truetype(str(folder / f"{name}.ttf"), GLYPH_SIDE))


def _written(font: object) -> Tensor:
    """[10, GLYPH_SIDE, GLYPH_SIDE]."""
    from PIL import Image, ImageDraw

    pages = []
    for digit in range(10):
        page = Image.new("L", (2 * GLYPH_SIDE, 2 * GLYPH_SIDE))
        ImageDraw.Draw(page).text((GLYPH_SIDE // 2, GLYPH_SIDE // 2), str(digit), fill=255, font=font)  # type: ignore[arg-type]
        left, top, right, bottom = page.getbbox() or (0, 0, 1, 1)
        height, width = bottom - top, right - left
        side = max(height, width) + 4
        middle = Image.new("L", (side, side))
        middle.paste(page.crop((left, top, right, bottom)), ((side - width) // 2, (side - height) // 2))
        pages.append(np.asarray(middle.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.LANCZOS)))
    return torch.from_numpy(np.stack(pages)).float() / 255


# --- strokes ----------------------------------------------------------------------------------------------------------


def _arc(x: float, y: float, wide: float, high: float, begin: float, end: float) -> list[Point]:
    """Points of an ellipse around (x, y) from one angle to another, in degrees; 0 is to the right, 90 below."""
    count = max(2, int(abs(end - begin) / 12))
    angles = [math.radians(begin + (end - begin) * i / count) for i in range(count + 1)]
    return [(x + wide * math.cos(angle), y + high * math.sin(angle)) for angle in angles]


def _styles() -> Iterator[list[list[list[Point]]]]:
    """Of each style the strokes of the ten digits, in a square from -1 to 1, y down."""
    nought = [_arc(0, 0, 0.5, 0.8, 0, 360)]
    one = [[(0.08, -0.8), (0.08, 0.8)], [(0.08, -0.8), (-0.25, -0.5)]]
    two = [[*_arc(0, -0.38, 0.46, 0.42, -170, 40), (-0.46, 0.8), (0.5, 0.8)]]
    three = [[*_arc(-0.02, -0.41, 0.44, 0.39, -150, 90)], [*_arc(-0.02, 0.39, 0.48, 0.41, -90, 150)]]
    four = [[(0.25, 0.8), (0.25, -0.8), (-0.5, 0.3), (0.5, 0.3)]]
    five = [[(0.4, -0.8), (-0.35, -0.8), (-0.42, -0.08), *_arc(-0.02, 0.29, 0.48, 0.5, -130, 140)]]
    six = [_arc(0, 0.33, 0.46, 0.47, 0, 360), [(0.25, -0.8), *_arc(0.1, 0.2, 0.56, 0.9, -120, -180)]]
    seven = [[(-0.48, -0.8), (0.48, -0.8), (-0.12, 0.8)]]
    eight = [_arc(0, -0.4, 0.38, 0.4, 0, 360), _arc(0, 0.4, 0.46, 0.41, 0, 360)]
    nine = [_arc(0, -0.33, 0.46, 0.47, 0, 360), [*_arc(-0.1, -0.2, 0.56, 0.9, 0, 60), (-0.25, 0.8)]]
    plain = [nought, one, two, three, four, five, six, seven, eight, nine]
    yield plain
    other = list(plain)
    other[1] = [[(0, -0.8), (0, 0.8)]]
    other[4] = [[(-0.3, -0.8), (-0.45, 0.15), (0.45, 0.15)], [(0.3, -0.35), (0.3, 0.8)]]
    other[7] = [*seven, [(-0.25, 0.0), (0.38, 0.0)]]
    other[9] = [_arc(0, -0.35, 0.42, 0.45, 0, 360), [(0.42, -0.35), (0.36, 0.8)]]
    other[3] = [[(-0.45, -0.8), (0.42, -0.8), (0.0, -0.15), *_arc(-0.04, 0.32, 0.5, 0.48, -80, 150)]]
    yield other
    third = list(plain)
    third[1] = [*one, [(-0.3, 0.8), (0.42, 0.8)]]
    third[0] = [_arc(0, 0, 0.6, 0.8, 0, 360)]
    third[6] = [_arc(0, 0.38, 0.42, 0.42, 0, 360), [(0.1, -0.8), (-0.4, 0.25)]]
    yield third


def _stroked(strokes: list[list[list[Point]]], width: float) -> Tensor:
    """[10, GLYPH_SIDE, GLYPH_SIDE]: strokes of half-width `width`, with round ends."""
    axis = (torch.arange(GLYPH_SIDE) + 0.5) / GLYPH_SIDE * 2 - 1
    at = torch.stack((axis[None, :].expand(GLYPH_SIDE, -1), axis[:, None].expand(-1, GLYPH_SIDE)), dim=-1)
    drawn = []
    for digit in strokes:
        ends = torch.tensor([(*a, *b) for line in digit for a, b in pairwise(line)])
        begin, along = ends[:, :2], ends[:, 2:] - ends[:, :2]
        off = at[:, :, None] - begin
        share = ((off * along).sum(-1) / (along * along).sum(-1).clamp_min(1e-9)).clamp(0, 1)
        distance = (off - share[..., None] * along).norm(dim=-1).amin(-1)
        drawn.append((0.5 - (distance - width) * GLYPH_SIDE / 2).clamp(0, 1))
    return torch.stack(drawn)
