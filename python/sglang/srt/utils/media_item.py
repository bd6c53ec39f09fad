"""An image or a video of a prompt, as messages carry it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang.srt.utils.shared_array import SharedArray


class MediaItem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An image or a video of a prompt."""

    kind: Literal["image", "video"]
    digest: bytes
    """32 bytes, SHA-256 of the picture or of the patches of a video, the grid and the kind: items with equal digests
    have equal features."""
    spans: list[tuple[int, int]]
    """Runs [start, end) of placeholder positions in `input_ids`, ascending. A video may have one for each frame."""
    grid: tuple[int, int, int]
    """Frames (after those that are taken together), rows and columns of patches."""
    pixels: SharedArray
    """[patches, values of a patch], as the model's processor gives them."""
    frame_seconds: float = 0.0
    """Between frames of the grid of a video."""
