"""The source of an image or a video as the client sends it, before anything of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class MediaSource:
    """`source`: an http, https, data or file URL, or the file itself in base64. `detail`: auto, low or high; a low one
    is shown to the model at no more than 512 pixels a side."""

    kind: Kind
    source: str
    detail: str | None = None
