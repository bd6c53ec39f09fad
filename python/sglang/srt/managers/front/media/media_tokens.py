"""Tokens and texts that stand for images and videos in a multimodal model's prompts."""

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
"""Processor family in `media.processors` by model_type of config.json."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Placeholders and marks of a model family. `image` and `video`: the placeholder that a template writes once, and
    that is repeated for each embedding; None: the model has no such input. `frame`: the repeated placeholder of a
    video, if it is another one. `start`, `end`: marks around a placeholder, which each frame of a video repeats.
    `run_start`, `run_end`: marks that the processor, not the template, writes around each run of placeholders.
    `video_text`: text that templates write for a video if no token exists; it is replaced by `image_text`, and videos
    use the placeholder of images. `picture_text`: text that templates write for an image, if it differs from
    `image_text`, the text of the placeholder."""

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
        """Returns the text of a prompt with a placeholder for each image and video, and its media in the order of the
        text."""
        if self.picture_text:
            whole = text.replace(self.image_text, self.picture_text)  # some templates write the placeholder themselves
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
        """Returns the placeholder of this kind of input."""
        return self.image if kind == "image" else self.video

    @property
    def video_frame(self) -> int:
        """Returns the placeholder of a video's embedding."""
        return self.image if self.video is None else self.video if self.frame is None else self.frame


def media_tokens(config: Mapping[str, Any]) -> MediaTokens | None:
    """Returns the tokens for a whole config.json; None for a text-only model, or one whose pictures are not
    supported."""
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
