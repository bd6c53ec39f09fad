"""Tokens and texts that stand for images and videos in a multimodal model's prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.front.media.media_source import KINDS, Kind, MediaSource
from sglang.srt.plan.media import placeholders
from sglang.srt.towers.registry import tower_record


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Placeholders and marks of a model family. `image` and `video`: the placeholder that a template writes once, and
    that is repeated for each embedding; None: the model has no such input. `frame`: the repeated placeholder of a
    video, if it is another one. `start`, `end`: marks around a placeholder, which each frame of a video repeats.
    `run_start`, `run_end`: marks that the processor, not the template, writes around each run of placeholders.
    `video_text`: text that templates write for a video if no token exists; it is replaced by `image_text`, and videos
    use the placeholder of images. `picture_text`: text that templates write for an image, if it differs from
    `image_text`, the text of the placeholder. `fill`: as in `PromptForm`."""

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
    fill: int = 0

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


def media_tokens(config: Mapping[str, Any], by_class: bool = False) -> MediaTokens | None:
    """Returns the tokens for a whole config.json; None for a text-only model, or one whose pictures are not supported.
    by_class: a class of transformers computes the model."""
    record = tower_record(config, by_class)
    if record is None:
        return None
    form, (image, video) = record.prompt, placeholders(config)
    if image is None:
        return None
    if form.video_text:
        video = image
    start, end = _marks(config, form.marks)
    run_start, run_end = _marks(config, form.run_marks)
    return MediaTokens(
        record.name,
        image,
        video if form.reads_videos else None,
        start=start,
        end=end,
        run_start=run_start,
        run_end=run_end,
        frame=image if form.frames_are_images else None,
        video_text=form.video_text,
        image_text=form.image_text,
        picture_text=form.picture_text,
        fill=form.fill,
    )


def _marks(config: Mapping[str, Any], keys: tuple[str, str] | None) -> tuple[int | None, int | None]:
    return (None, None) if keys is None else (config.get(keys[0]), config.get(keys[1]))
