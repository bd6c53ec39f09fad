"""Source of an image or video as the client sent it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class MediaSource:
    """`source`: an http, https, data or file URL, or the file itself in base64. `detail`: auto, low or high; low limits
    each side to 512 pixels for the model."""

    kind: Kind
    source: str
    detail: str | None = None
