"""Reads how a model takes images and videos from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.towers.base.spec import Tower
from sglang.srt.towers.registry import tower_record


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """How a model takes images and videos.

    image_token, video_token: ids of the placeholders; None: the model takes none
    sections: a placeholder's position has a time, a row and a column (M-RoPE); otherwise positions count as in text
    tower: the encoder
    positions_a_second: distance in time of the frames of one run of placeholders; 0: frames are 1 apart
    both_ways: the placeholders of a run attend to each other in both directions, in layers with a window
    fill: number of an item's first tokens of which some are left out (`PromptForm.fill`), and which see no later ones
    plain_token: the token whose per-layer embedding placeholders have
    """

    image_token: int | None
    video_token: int | None
    sections: bool
    tower: Tower
    positions_a_second: int = 0
    both_ways: bool = False
    fill: int = 0
    plain_token: int = 0

    @property
    def merge(self) -> int:
        """Patches a side of the square that becomes one token."""
        return self.tower.merge

    @property
    def deepstack_levels(self) -> int:
        """Number of layers, from the first on, behind which encoder features are added to the stream."""
        return len(self.tower.deepstack)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the number of placeholders of a grid of frames x rows x columns of patches."""
        return self.tower.num_tokens(grid)


PATCHES_A_STEP = 1 << 14
"""Most patches of an encoder step with several items; decoding requests wait for such a step."""
PATCH_BUFFERS = 2
"""Number of device buffers for patches, of PATCHES_A_STEP each."""
PATCH_LAYERS_BESIDE = 1 << 15
"""Patches times encoder layers of one slice of an encoder step while requests decode, where no times are measured
(`model_executor.media_pace`)."""
FEATURE_BYTES = 1 << 29
"""Budget for the features of images and videos that a server keeps."""


_IMAGE_KEYS = ("image_token_id", "media_placeholder_token_id", "image_token_index")
_VIDEO_KEYS = ("video_token_id", "video_token_index")


def placeholders(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the token ids that stand for an image and for a video in the prompts of a config.json's model."""
    outer, record = ConfigReader(config, "config.json"), tower_record(config)
    image, video = (0, 0) if record is None else record.prompt.default_ids
    return outer.count(*_IMAGE_KEYS) or image or None, outer.count(*_VIDEO_KEYS) or video or None


def check_placeholders(media: MediaDescription, vocab_size: int, source: str) -> None:
    """Raises UserError for a placeholder outside of the vocabulary: the embeddings of all ids of a prompt are read
    before features replace some."""
    for key, token in (("image", media.image_token), ("video", media.video_token)):
        if token is not None and token >= vocab_size:
            raise UserError(
                f"{source}: the placeholder of {key}s has the id {token:,}, and the vocabulary ends at {vocab_size:,}. "
                f"Set {key}_token_id to the tokenizer's; --language-model-only serves text alone."
            )


def describe_media(config: Mapping[str, Any], by_class: bool = False) -> MediaDescription | None:
    """Describes a model's images and videos; None: it takes none, or its encoder is not implemented. by_class: a class
    of transformers computes the model."""
    record = tower_record(config, by_class)
    if record is None:
        return None
    outer = ConfigReader(config, "config.json")
    inner = ConfigReader(record.keys(config) or {}, "config.json vision_config")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    image, video = placeholders(config)
    tower = record.describe(outer, inner)
    return MediaDescription(
        image_token=image,
        video_token=video,
        sections=record.sections,
        tower=tower,
        positions_a_second=inner.count("tokens_per_second"),
        both_ways=text.values.get("use_bidirectional_attention") == "vision" or tower.longest_run > 0,
        fill=record.prompt.fill,
        plain_token=text.count("pad_token_id"),
    )
