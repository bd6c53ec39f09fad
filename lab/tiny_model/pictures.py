"""Pictures that the embedded model's eyes learn from, drawn in batches on any device: digits, shapes and plain colours.

A picture has up to SLOTS items, each the coverage of a form in one colour, laid over a background. Edges are as soft as
those of a photo that was made smaller, sides are stretched as the processor stretches them to whole squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_model.glyphs import glyphs

COLORS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 40), (200, 30, 30), (240, 60, 50)),
    "green": ((0, 128, 0), (0, 255, 0), (40, 170, 70), (60, 200, 80)),
    "blue": ((0, 0, 255), (30, 90, 220), (20, 60, 160), (60, 130, 245)),
    "yellow": ((255, 255, 0), (250, 215, 40), (255, 235, 80)),
    "orange": ((255, 165, 0), (255, 130, 20), (245, 150, 40)),
    "purple": ((128, 0, 128), (150, 50, 200), (110, 30, 160)),
    "black": ((0, 0, 0), (30, 30, 30)),
    "white": ((255, 255, 255), (235, 235, 235)),
    "gray": ((128, 128, 128), (150, 150, 150), (105, 105, 105)),
    "brown": ((139, 69, 19), (120, 70, 40), (150, 80, 40), (101, 67, 33)),
}
"""Name -> colours between which it is drawn, red, green and blue of 255."""
COLOR_NAMES = tuple(COLORS)
SHAPES = ("circle", "square", "triangle")
DIGIT, NOTHING = len(SHAPES), -1
SLOTS = 8
MAX_PER_SHAPE = 6
KINDS = {"digit": 0.35, "shape": 0.2, "shapes": 0.35, "plain": 0.1}
"""Shares of pictures: one digit, one shape, several shapes, one colour."""
DIGIT_PICTURE, SHAPE_PICTURE, SHAPES_PICTURE, PLAIN_PICTURE = range(len(KINDS))
CONTRAST = 0.5
"""Least sum of the differences of three channels, of 1 each, between an item and what is behind it."""
PLACES_TRIED = 16


@dataclass(frozen=True, slots=True)
class Pictures:
    """`pixels` [B, 3, height, width], -1 to 1. `kind` [B]: of KINDS. `color`, `digit`, `shape` [B]: of the only item,
    or the first one. `counts` [B, shapes]. All but pixels int64."""

    pixels: Tensor
    kind: Tensor
    color: Tensor
    digit: Tensor
    shape: Tensor
    counts: Tensor


class Painter:
    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.glyphs = glyphs().to(self.device)

    def paint(self, count: int, height: int, width: int) -> Pictures:
        kind = self._choice(list(KINDS.values()), count)
        forms = self._forms(kind)
        color = self._integers(len(COLORS), count, SLOTS)
        same = self._uniform(0, 1, count) < 0.5
        color = torch.where(same[:, None], color[:, :1], color)
        paint, back = self._paints(color), self._background(color[:, 0], kind)
        far = (paint - back[:, None]).abs().sum(-1) >= CONTRAST
        forms = torch.where(far | (torch.arange(SLOTS, device=self.device) == 0), forms, NOTHING)
        radius, centre, fits = self._places(forms, kind, height, width)
        forms = torch.where(fits, forms, NOTHING)
        pixels = back[:, :, None, None].expand(-1, -1, height, width)
        coverage = self._coverage(forms, radius, centre, height, width)
        digit = self._integers(10, count)
        written = self._written(digit, radius[:, 0], centre[:, 0], height, width)
        coverage[:, 0] = torch.where((kind == DIGIT_PICTURE)[:, None, None], written, coverage[:, 0])
        for slot in range(SLOTS):
            share = coverage[:, slot, None]
            pixels = pixels * (1 - share) + paint[:, slot, :, None, None] * share
        noise = torch.randn(pixels.shape, generator=self.random, device=self.device)
        pixels = (pixels + noise * self._uniform(0, 0.02, count)[:, None, None, None]).clamp(0, 1)
        counts = torch.stack([(forms == shape).sum(1) for shape in range(len(SHAPES))], dim=1)
        return Pictures(2 * pixels - 1, kind, color[:, 0], digit, forms[:, 0].clamp(min=0), counts)

    # --- what is drawn ------------------------------------------------------------------------------------------------

    def _forms(self, kind: Tensor) -> Tensor:
        """[B, SLOTS]: shapes, DIGIT or NOTHING."""
        count = len(kind)
        wanted = torch.stack([self._often_few(count) for _ in SHAPES], dim=1)
        wanted[torch.arange(count, device=self.device), self._integers(len(SHAPES), count)] = 1 + self._integers(
            MAX_PER_SHAPE, count
        )
        ends = wanted.cumsum(1)
        slot = torch.arange(SLOTS, device=self.device)
        forms = (slot[None, :, None] >= ends[:, None, :]).sum(-1)
        forms = torch.where(forms < len(SHAPES), forms, NOTHING)
        one = torch.where(kind == DIGIT_PICTURE, DIGIT, self._integers(len(SHAPES), count))
        one = torch.where(kind == PLAIN_PICTURE, NOTHING, one)
        single = torch.where(slot == 0, one[:, None], NOTHING)
        return torch.where((kind == SHAPES_PICTURE)[:, None], forms, single)

    def _often_few(self, count: int) -> Tensor:
        return (self._uniform(0, 1, count) < 0.4) * (1 + self._integers(3, count))

    def _paints(self, color: Tensor) -> Tensor:
        """[..., 3] of color [...], 0 to 1: between the colours of that name."""
        table, used = _color_table()
        table, used = table.to(self.device)[color], used.to(self.device)[color]
        shares = used * self._uniform(0, 1, *used.shape).clamp_min(1e-6).log().neg()
        mixed = (table * (shares / shares.sum(-1, keepdim=True))[..., None]).sum(-2)
        return (mixed + self._uniform(-0.03, 0.03, *mixed.shape)).clamp(0, 1)

    def _background(self, color: Tensor, kind: Tensor) -> Tensor:
        """[B, 3], far from the first item's colour; a plain picture is of that colour."""
        count = len(color)
        chance = self._uniform(0, 1, count)
        name = self._integers(len(COLORS), count)
        name = torch.where(chance < 0.6, COLOR_NAMES.index("white"), name)
        name = torch.where(chance < 0.15, COLOR_NAMES.index("black"), name)
        own = self._paints(color)
        back = self._paints(name)
        near = ((back - own).abs().sum(-1) < 2 * CONTRAST) | (name == color)
        opposite = (own.mean(-1) < 0.5).float()[:, None].expand(-1, 3)
        back = torch.where(near[:, None], opposite, back)
        return torch.where((kind == PLAIN_PICTURE)[:, None], own, back)

    def _places(self, forms: Tensor, kind: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Radius [B, SLOTS] and centre [B, SLOTS, 2] (x, y) in pixels, and whether there was room for the item."""
        count, least = len(kind), min(height, width)
        several = kind == SHAPES_PICTURE
        crowd = (forms != NOTHING).sum(1).clamp_min(1).float()
        largest = torch.where(several, 0.62 * least / (1 + crowd.sqrt()), torch.full_like(crowd, 0.48 * least))
        smallest = torch.where(several, largest.clamp_max(4.0 / 64 * least), torch.full_like(crowd, 0.2 * least))
        share = self._uniform(0, 1, count, SLOTS)
        like = self._uniform(0, 1, count, 1)
        share = torch.where(self._uniform(0, 1, count, 1) < 0.5, like, share)
        radius = smallest[:, None] + share * (largest - smallest)[:, None]
        size = torch.tensor([width, height], device=self.device, dtype=torch.float32)
        centre = torch.zeros(count, SLOTS, 2, device=self.device)
        fits = torch.ones(count, SLOTS, dtype=torch.bool, device=self.device)
        for slot in range(SLOTS):
            margin = torch.minimum(radius[:, slot, None, None] * 1.02, size / 2)
            tried = margin + self._uniform(0, 1, count, PLACES_TRIED, 2) * (size - 2 * margin)
            if slot:
                gap = (tried[:, :, None] - centre[:, None, :slot]).norm(dim=-1)
                needed = (radius[:, :slot] + radius[:, slot, None]) * 1.04 + 1.0
                there = (forms[:, :slot] != NOTHING) & fits[:, :slot]
                free = ((gap >= needed[:, None]) | ~there[:, None]).all(-1)
                fits[:, slot] = free.any(1)
                centre[:, slot] = tried[torch.arange(count, device=self.device), free.int().argmax(1)]
            else:
                centre[:, slot] = tried[:, 0]
        return radius, centre, fits

    # --- coverages ----------------------------------------------------------------------------------------------------

    def _offsets(self, centre: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """centre [..., 2] -> x and y [..., height, width] from it."""
        x = torch.arange(width, device=self.device) + 0.5 - centre[..., 0, None]
        y = torch.arange(height, device=self.device) + 0.5 - centre[..., 1, None]
        return x[..., None, :].expand(*x.shape[:-1], height, width), y[..., :, None].expand(
            *y.shape[:-1], height, width
        )

    def _turned(self, x: Tensor, y: Tensor, angle: Tensor, stretch: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = angle.cos()[..., None, None], angle.sin()[..., None, None]
        x, y = x / stretch[..., None, None], y * stretch[..., None, None]
        return x * cos + y * sin, y * cos - x * sin

    def _coverage(self, forms: Tensor, radius: Tensor, centre: Tensor, height: int, width: int) -> Tensor:
        """[B, SLOTS, height, width], 0 to 1."""
        count = len(forms)
        x, y = self._offsets(centre, height, width)
        angle = self._uniform(-0.4, 0.4, count, SLOTS) * (self._uniform(0, 1, count, SLOTS) < 0.6)
        angle = torch.where((forms == 2) & (self._uniform(0, 1, count, SLOTS) < 0.25), angle + math.pi, angle)
        stretch = self._uniform(0.9, 1.11, count, 1).expand(-1, SLOTS)
        x, y = self._turned(x, y, angle, stretch)
        r = (radius / 1.1)[..., None, None]
        circle = torch.hypot(x, y) - r
        square = torch.maximum(x.abs(), y.abs()) - 0.8 * r
        lean = math.sqrt(3) / 2
        triangle = torch.maximum(torch.maximum(lean * x - 0.5 * y, -lean * x - 0.5 * y), y) - 0.5 * r
        form = forms[..., None, None]
        distance = torch.where(form == 0, circle, torch.where(form == 1, square, triangle))
        hollow = (self._uniform(0, 1, count, 1) < 0.2) & (radius > 7)
        line = (radius * self._uniform(0.1, 0.2, count, SLOTS)).clamp_min(0.9)[..., None, None]
        distance = torch.where(hollow[..., None, None], (distance + line).abs() - line, distance)
        soft = self._uniform(0.7, 1.6, count, 1)[..., None, None]
        return (0.5 - distance / soft).clamp(0, 1) * (form != NOTHING)

    def _written(self, digit: Tensor, radius: Tensor, centre: Tensor, height: int, width: int) -> Tensor:
        """[B, height, width] of digits."""
        count = len(digit)
        x, y = self._offsets(centre, height, width)
        x, y = self._turned(
            x,
            y,
            self._uniform(-0.22, 0.22, count) * (self._uniform(0, 1, count) < 0.7),
            self._uniform(0.85, 1.15, count),
        )
        x = x + y * self._uniform(-0.2, 0.2, count)[:, None, None]
        places = torch.stack((x, y), dim=-1) / radius[:, None, None, None]
        style = self._integers(self.glyphs.shape[1], count)
        return F.grid_sample(self.glyphs[digit, style][:, None], places, align_corners=False)[:, 0].clamp(0, 1)

    # --- chance -------------------------------------------------------------------------------------------------------

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.random, device=self.device)

    def _integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.random, device=self.device)

    def _choice(self, shares: Sequence[float], count: int) -> Tensor:
        return torch.multinomial(
            torch.tensor(shares, device=self.device), count, replacement=True, generator=self.random
        )


@cache
def _color_table() -> tuple[Tensor, Tensor]:
    """[colors, variants, 3], 0 to 1, and which variants there are [colors, variants]."""
    most = max(len(variants) for variants in COLORS.values())
    table, used = torch.zeros(len(COLORS), most, 3), torch.zeros(len(COLORS), most)
    for row, variants in enumerate(COLORS.values()):
        table[row, : len(variants)] = torch.tensor(variants) / 255
        used[row, : len(variants)] = 1
    return table, used


def patches(pixels: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """pixels [B, 3, height, width] -> [B, patches, values], in the order of Qwen3-VL's processor: the patches of a
    square of the merge follow one another, and every frame of a patch is the same picture."""
    batch, channels, height, width = pixels.shape
    squares = pixels.view(
        batch, channels, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch
    )
    ordered = squares.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None].expand(*[-1] * 6, frames, -1, -1)
    return ordered.reshape(batch, -1, channels * frames * patch * patch)
