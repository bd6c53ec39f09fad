"""The tokens that stand for images and videos in prompts of a model that sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.front.media.media_source import Kind

_FAMILIES: Mapping[str, str] = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm46v": "glm46v",
    "gemma4": "gemma4",
    "kimi_k25": "kimi_k25",
}
"""model_type of config.json -> the processors of `media.processors`."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """`image` and `video`: the placeholder that a template writes once, and that is repeated once an embedding; None:
    there is no such input. `start`, `end`: marks around a placeholder that frames of a video bring themselves.
    `image_start`, `image_end`: marks that the processor writes, not the template."""

    family: str
    image: int
    video: int | None = None
    start: int | None = None
    end: int | None = None
    image_start: int | None = None
    image_end: int | None = None

    def of(self, kind: Kind) -> int | None:
        return self.image if kind == "image" else self.video


def media_tokens(config: Mapping[str, Any]) -> MediaTokens | None:
    """Reads a whole config.json; None for a model that only reads, or whose pictures are not prepared here."""
    family = _FAMILIES.get(str(config.get("model_type")))
    image = config.get("image_token_id", config.get("media_placeholder_token_id"))
    if family is None or not isinstance(config.get("vision_config"), Mapping) or not isinstance(image, int):
        return None
    if family == "gemma4":
        return MediaTokens(family, image, image_start=config.get("boi_token_id"), image_end=config.get("eoi_token_id"))
    if family != "qwen3_vl":
        return MediaTokens(family, image)
    return MediaTokens(
        family,
        image,
        config.get("video_token_id"),
        config.get("vision_start_token_id"),
        config.get("vision_end_token_id"),
    )
