"""Images and videos in the content of messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.managers.front.media.media_source import Kind, MediaSource

_FIELDS: dict[str, Kind] = {"image_url": "image", "video_url": "video"}
"""Kind of media by the type of a part, which is also the name of its field."""


def media_kind(part: dict[str, Any]) -> Kind | None:
    """Returns the kind of media in a part; None for other parts."""
    return _FIELDS.get(part["type"])


def media_of(messages: list[dict[str, Any]]) -> list[MediaSource]:
    """Returns all images and videos of a conversation, in order. Raises ApiError 400 for a part without its URL."""
    return list(_sources(messages))


def _sources(messages: list[dict[str, Any]]) -> Iterator[MediaSource]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = media_kind(part)
            if kind is None:
                continue
            value = part.get(part["type"])
            fields = {"url": value} if isinstance(value, str) else value
            if not isinstance(fields, dict) or not isinstance(fields.get("url"), str) or not fields["url"]:
                name = part["type"]
                raise bad_request(f'a content part of type "{name}" needs {{"{name}": {{"url": ...}}}}', "messages")
            yield MediaSource(kind, fields["url"], fields.get("detail"))


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Returns an image in the form of a chat request's content."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def base64_part(data: str, media_type: str = "image/*") -> dict[str, Any]:
    """Returns a content part with an image in base64."""
    return image_part(f"data:{media_type};base64,{data}")
