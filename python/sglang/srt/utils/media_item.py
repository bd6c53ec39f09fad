"""An image or video of a prompt, in the form that messages carry."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang.srt.utils.shared_array import SharedArray


class MediaItem(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An image or a video of a prompt."""

    kind: Literal["image", "video"]
    digest: bytes
    """SHA-256 (32 bytes) of the picture or of a video's patches, the grid and the kind: items with equal digests have
    equal features."""
    spans: list[tuple[int, int]]
    """Runs [start, end) of placeholder positions in `input_ids`, ascending. A video may have one for each frame."""
    grid: tuple[int, int, int]
    """Temporal patches, rows and columns of patches."""
    pixels: SharedArray
    """[patches, values a patch], as the model's processor gives them."""
    frame_seconds: float = 0.0
    """Seconds between the grid's frames of a video."""
