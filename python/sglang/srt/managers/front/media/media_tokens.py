"""The tokens that stand for images and videos in prompts of a model that sees."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.front.media.media_source import KINDS, Kind, MediaSource
from sglang.srt.plan.media import placeholders

PROCESSORS: Mapping[str, str] = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
    "qwen3_8_flash_next": "qwen3_vl",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm46v": "glm4v",
    "glm5_next": "glm5_next",
    "gemma4": "gemma4",
    "kimi_k25": "kimi_k25",
    "minimax_m3_vl": "minimax_m3",
    "step3p7": "step3p7",
    "muse_glimmer": "muse_glimmer",
    "llama4": "llama4",
    "inkling_mm_model": "inkling",
    "deepseek_v41": "deepseek_v41",
}
"""model_type of config.json -> the processors of `media.processors`."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """`image` and `video`: the placeholder that a template writes once, and that is repeated once an embedding; None:
    there is no such input. `frame`: what is repeated for a video, if it is another one. `start`, `end`: marks around a
    placeholder that frames of a video bring themselves. `run_start`, `run_end`: marks that the processor writes around
    each run of placeholders, not the template. `video_text`: what templates write for a video where that is no token;
    `image_text` takes its place, and videos have the placeholder of images. `picture_text`: what templates write for an
    image, if that is another text than `image_text`, which has its placeholder."""

    family: str
    image: int
    video: int | None = None
    start: int | None = None
    end: int | None = None
    run_start: int | None = None
    run_end: int | None = None
    frame: int | None = None
    video_text: str = ""
    image_text: str = ""
    picture_text: str = ""

    def with_placeholders(self, text: str, media: Sequence[MediaSource]) -> tuple[str, Sequence[MediaSource]]:
        """Returns the text of a prompt with a token for each video, and its images and videos in the order of the
        text."""
        if self.picture_text:
            whole = text.replace(self.image_text, self.picture_text)  # some templates write the placeholder
            return whole.replace(self.picture_text, self.image_text), media
        if not self.video_text:
            return text, media
        pattern = f"{re.escape(self.video_text)}|{re.escape(self.image_text)}"
        kinds: list[Kind] = ["video" if mark == self.video_text else "image" for mark in re.findall(pattern, text)]
        if sorted(kinds) == sorted(source.kind for source in media):
            of_kind = {kind: iter([source for source in media if source.kind == kind]) for kind in KINDS}
            media = [next(of_kind[kind]) for kind in kinds]
        return text.replace(self.video_text, self.image_text), media

    def of(self, kind: Kind) -> int | None:
        return self.image if kind == "image" else self.video

    @property
    def video_frame(self) -> int:
        """The placeholder that stands for an embedding of a video."""
        return self.image if self.video is None else self.video if self.frame is None else self.frame


def media_tokens(config: Mapping[str, Any]) -> MediaTokens | None:
    """Reads a whole config.json; None for a model that only reads, or whose pictures are not prepared here."""
    family = PROCESSORS.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vision_config"), Mapping):
        return None
    image, video = placeholders(config)
    if image is None:
        return None
    if family == "kimi_k25":
        video_text = "<|kimi_k25_video_placeholder|>"
        return MediaTokens(family, image, image, video_text=video_text, image_text="<|media_pad|>")
    if family == "llama4":
        return MediaTokens(family, image, image_text="<|patch|>", picture_text="<|image|>")
    if family == "inkling":
        mark = "<|content_image|>"
        return MediaTokens(family, image, image_text=f"{mark}<|unused_200054|>", picture_text=mark)
    if family == "gemma4":
        marks = (config.get("boi_token_id"), config.get("eoi_token_id"))
        return MediaTokens(family, image, video, run_start=marks[0], run_end=marks[1])
    if family in ("glm4v", "glm5_next"):
        return MediaTokens(family, image, video, frame=image)
    if family in ("qwen2_5_vl", "minimax_m3", "step3p7", "muse_glimmer", "deepseek_v41"):
        return MediaTokens(family, image, video)
    marks = (config.get("vision_start_token_id"), config.get("vision_end_token_id"))
    return MediaTokens(family, image, video, start=marks[0], end=marks[1])
