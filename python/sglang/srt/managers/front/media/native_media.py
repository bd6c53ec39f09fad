"""Parsing of `image_data` and `video_data` of `/generate` and `Engine.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.media_source import Kind, MediaSource

NativeMedia = str | list[str | list[str] | None] | None
"""One source; a list of sources of a single prompt; or for a batch one entry a prompt (None, one or several)."""


def native_media(image_data: Any, video_data: Any, num_prompts: int, is_batch: bool) -> list[list[MediaSource]] | None:
    """Returns the images and videos of each prompt; None if there are none. Raises RequestError."""
    images = _by_prompt("image", image_data, num_prompts, is_batch)
    videos = _by_prompt("video", video_data, num_prompts, is_batch)
    if not any(images) and not any(videos):
        return None
    return [[*these, *those] for these, those in zip(images, videos, strict=True)]


def _by_prompt(kind: Kind, data: Any, num_prompts: int, is_batch: bool) -> list[list[MediaSource]]:
    if data is None:
        return [[]] * num_prompts
    entries = data if isinstance(data, list) else [data]
    if not is_batch:
        nested = len(entries) == 1 and isinstance(entries[0], list)
        return [_sources(kind, entries[0] if nested else entries)]
    if len(entries) != num_prompts:
        raise RequestError(f"{kind}_data has {len(entries)} entries for {num_prompts} prompts; give one for each")
    return [_sources(kind, entry if isinstance(entry, list) else [entry]) for entry in entries]


def _sources(kind: Kind, entries: Sequence[Any]) -> list[MediaSource]:
    given = [entry for entry in entries if entry is not None]
    if not all(isinstance(entry, str) for entry in given):
        raise RequestError(f"{kind}_data must hold strings: URLs, data URLs or base64")
    return [MediaSource(kind, entry) for entry in given]
