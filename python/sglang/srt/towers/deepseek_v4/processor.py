"""Pictures of DeepSeek-V4's vision edition, whose settings stand in config.json; they count, whatever a file of a
processor says.

Source of sizes: the image processor beside the checkpoint, as its ports describe it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.towers.deepseek_v4.spec import ALIGNED, FILL, flat_keys, paired_tokens
from sglang.srt.towers.deepseek_v41.processor import check_limits, views_of
from sglang.srt.towers.pictures.patches import Settings
from sglang.srt.towers.pictures.processor import Processor

_LEAST = 16
"""Fewest tokens of an image that a limit may name: a pair of rows, the marks around it and what fills them up."""

_MOST = "tokens of the longest image"
"""Setting that holds the limit of config.json, within which that of a server is: memory is planned for it."""


def _tokens(columns: int, rows: int, merge: int) -> int:
    """Counts, beside those of the image, the most that fill the prompt before it."""
    return FILL + paired_tokens(math.ceil(rows / merge), math.ceil(columns / merge))


def _fit(width: float, height: float, patch: int, merge: int, maximum: int) -> tuple[int, int]:
    """Looks for the size with fewer and fewer tokens: what fills pairs of rows up is not in the estimate."""
    columns, rows = math.ceil(width / patch), math.ceil(height / patch)
    for budget in range(maximum - FILL, _LEAST - 2 * ALIGNED, -1):
        if _tokens(columns, rows, merge) <= maximum:
            break
        columns, rows = _pairs_within(budget, width, height, patch, merge)
    return columns, rows


def _pairs_within(tokens: int, width: float, height: float, patch: int, merge: int) -> tuple[int, int]:
    """Returns the columns and rows of patches of the largest picture of this aspect ratio with an even number of rows
    of about so many tokens."""
    shape, side = height / width, patch * merge
    columns = math.sqrt((tokens - 2) / shape + 0.25) - 0.5
    rows = columns * shape
    if columns < 1:
        return merge, (tokens - 2) // 4 * 2 * merge
    if rows < 2:
        return ((tokens - 2) // 2 - 1) * merge, 2 * merge
    scale = min(math.floor(columns) * side / width, math.floor(rows) // 2 * 2 * side / height)
    return math.floor(width * scale / patch), math.floor(height * scale / patch)


def _check(settings: Settings) -> None:
    check_limits(settings)
    maximum, most = settings.get("max_image_tokens", _LEAST), settings.get(_MOST)
    if maximum < _LEAST or (most is not None and maximum > most):
        raise UserError(f"max_image_tokens must be from {_LEAST} to {most} for this model; got {maximum}.")


def _keys(config: Mapping[str, Any]) -> Settings:
    keys = flat_keys(config)
    return {} if keys is None else {**keys, _MOST: keys.get("max_image_tokens")}


PROCESSOR = Processor(views=views_of(_fit, _tokens), keys=_keys, of_config=_keys, check=_check)
