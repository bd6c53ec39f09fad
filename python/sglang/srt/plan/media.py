"""What a model that reads images and videos says of them in its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.plan.tower import Tower, describe_tower


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """`image_token`, `video_token`: the placeholders in token ids (None: the model takes none). `merge`: a placeholder
    stands for a square of so many patches a side. `deepstack_levels`: layers from the first on, behind which the
    encoder's features add to the stream. `sections`: whether a placeholder's position has a time, a row and a column.
    """

    image_token: int | None
    video_token: int | None
    merge: int
    deepstack_levels: int = 0
    sections: bool = False
    tower: Tower | None = None
    """The encoder; None: it is not served, or left out."""

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the placeholders of frames x rows x columns of patches."""
        frames, rows, columns = grid
        return frames * (rows // self.merge) * (columns // self.merge)


PATCHES_A_STEP = 1 << 14
"""Limit for the patches of an encoder step of several items; requests that decode wait for one."""
FEATURE_BYTES = 1 << 29
"""Budget for the features of images and videos that a server keeps."""
SECTIONED = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""The `model_type` of configs whose placeholders have a position in each section, one frame's after the other's."""
COUNTED = frozenset({"kimi_k25"})
"""Those whose placeholders are counted as text is. Of Kimi K2.5 images only: its encoder averages over frames."""

ENCODERS = SECTIONED
"""Those whose image encoder is here; others are served for text alone."""


def describe_media(config: Mapping[str, Any]) -> MediaDescription | None:
    """Describes the images of a config.json; None where the model takes none, or its encoder is not here."""
    vision, model_type = config.get("vision_config"), config.get("model_type")
    if model_type not in ENCODERS or not isinstance(vision, Mapping):
        return None
    outer, tower = ConfigReader(config, "config.json"), ConfigReader(vision, "config.json vision_config")
    image_token = outer.count("image_token_id", "media_placeholder_token_id") or None
    if model_type in COUNTED:
        squares = tower.default("merge_kernel_size", list, [2, 2])
        return MediaDescription(image_token, None, int(squares[0]))
    return MediaDescription(
        image_token,
        video_token=outer.count("video_token_id") or None,
        merge=tower.positive("spatial_merge_size"),
        deepstack_levels=len(tower.default("deepstack_visual_indexes", list, [])),
        sections=True,
        tower=describe_tower(tower),
    )
