"""Reads Inkling's encoder of images from config.json. Its layers see one patch alone and fold it step by step to one
vector."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Cut, NamedShape, Tower, only

NORM_EPS = 1e-6
"""Epsilon of all norms."""
PATCHES_AT_ONCE = 1 << 10
"""Patches that go through the layers together: the first layers' values are many times a token's features."""
FRAMES, COLOURS = 2, 3
"""Frames and colours of a patch; an image counts as two equal frames."""
_TOWER = "model.visual."
_CHANNEL_STEP = 64


@dataclass(frozen=True, slots=True)
class Fold:
    """A layer: each box of `frames` x `side` x `side` places with `channels` channels becomes one place with `out`
    channels."""

    frames: int
    side: int
    channels: int
    out: int

    @property
    def inputs(self) -> int:
        """Values of a box."""
        return self.frames * self.side**2 * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingTower(Tower):
    """Inkling's encoder. A patch has its frames, rows, columns and colours in this order, and becomes one token. No
    patch sees another one."""

    folds: tuple[Fold, ...]
    cuts: ClassVar[Mapping[str, Cut]] = {}
    prefixes: ClassVar[tuple[str, ...]] = (_TOWER,)

    @property
    def head_dim(self) -> int:
        return 0

    def sees_whole_clips(self, layer: int) -> bool:
        return False

    def shapes(self) -> Iterator[NamedShape]:
        for i, fold in enumerate(self.folds):
            yield f"{_TOWER}layers.linear_{i}.weight", (fold.out, fold.inputs)
            if i < len(self.folds) - 1:
                yield f"{_TOWER}layers.norm_{i}.weight", (fold.out,)
        yield f"{_TOWER}final_norm.weight", (self.out_size,)

    def activation_size(self) -> int:
        """Returns the features of each patch, and its share of what the patches that are computed at once hold: a
        layer's input, its output, and that twice in float32."""
        places, widest = self.patch_values // self.patch_shape[0], 0
        for fold in self.folds:
            before, places = places, places // (fold.frames * fold.side**2)
            widest = max(widest, before * fold.channels + 5 * places * fold.out)
        return self.out_size + -(-widest // 16)


def describe_inkling(config: ConfigReader, vision: ConfigReader) -> InklingTower:
    """Describes the encoder of a config. Raises UserError for forms that are not computed."""
    only(vision, "vision_encoder_type", "hmlp")
    if not vision.default("use_vision_norm", bool, True):
        raise UserError(f"{vision.source}: use_vision_norm = False is not supported.")
    patch, frames = vision.positive("patch_size", 40), vision.positive("temporal_patch_size", FRAMES)
    channels = vision.count("n_channels", "num_channels") or COLOURS
    text = ConfigReader(config.default("text_config", dict, {}), f"{config.source} text_config")
    out, layers = text.positive("hidden_size"), vision.count("num_hidden_layers") or vision.positive("n_layers")
    if (frames, channels) != (FRAMES, COLOURS):
        raise UserError(
            f"{vision.source}: patches of {frames} frames with {channels} colours are not supported; "
            f"supported: {FRAMES} frames with {COLOURS} colours."
        )
    folds = planned_folds(frames, patch, channels, layers, out)
    return InklingTower(
        hidden_size=max(fold.out for fold in folds),
        intermediate_size=0,
        num_layers=1,
        num_heads=1,
        patch_shape=(channels, frames, patch, patch),
        merge=1,
        out_size=out,
        folds=folds,
    )


def planned_folds(frames: int, patch: int, channels: int, layers: int, out: int) -> tuple[Fold, ...]:
    """Returns the layers. Between a pixel and a patch there are sizes: the number of places is multiplied by one prime
    factor after the other, the largest first, and those of time last. Each layer ends at a size whose number of places
    is nearest to even (logarithmic) steps. With fewer layers than sizes all end at different ones; otherwise each at
    its nearest, and some fold nothing."""
    sizes = [(1, 1, channels)]
    for prime in _primes(patch):
        side = sizes[-1][1] * prime
        sizes.append((1, side, _whole(side**2 * channels)))
    for prime in _primes(frames):
        time = sizes[-1][0] * prime
        sizes.append((time, patch, _CHANNEL_STEP * time * patch**2 * channels))  # as transformers has it
    total = math.log(frames * patch**2 * channels)
    wanted = [total * i / layers for i in range(layers + 1)]
    given = [math.log(time * side**2) for time, side, _ in sizes]
    chosen = _nearest_apart(wanted, given) if layers < len(sizes) else [_nearest(value, given) for value in wanted]
    chosen[0], chosen[-1] = 0, len(sizes) - 1
    folds = []
    for i, (first, last) in enumerate(itertools.pairwise(chosen)):
        before, after = sizes[first], sizes[last]
        size = out if i == layers - 1 else after[2]
        folds.append(Fold(after[0] // before[0], after[1] // before[1], before[2], size))
    return tuple(folds)


def _whole(values: int) -> int:
    return -(-values // _CHANNEL_STEP) * _CHANNEL_STEP


def _primes(number: int) -> list[int]:
    """Returns the prime factors, the largest first."""
    factors, prime = list[int](), 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors[::-1]


def _nearest(value: float, given: Sequence[float]) -> int:
    return min(range(len(given)), key=lambda i: abs(value - given[i]))


def _nearest_apart(wanted: Sequence[float], given: Sequence[float]) -> list[int]:
    """Returns the index of a given value for each wanted one, none twice, such that the sum of distances is smallest.
    Both lists ascend, and so does the result."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(given) + 1)
    for value in wanted:
        rows: list[tuple[float, list[int]]] = [(math.inf, [])]
        for i, other in enumerate(given):
            cost, numbers = best[i]
            rows.append(min(rows[-1], (cost + abs(value - other), [*numbers, i]), key=lambda row: row[0]))
        best = rows
    return best[-1][1]
