"""Reads how a model takes images and videos from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.towers.deepseek_vit import describe_deepseek_vit
from sglang.srt.plan.towers.gemma4 import describe_gemma4
from sglang.srt.plan.towers.glm4v import describe_glm4v, describe_glm5_next
from sglang.srt.plan.towers.inkling import describe_inkling
from sglang.srt.plan.towers.llama4 import describe_llama4
from sglang.srt.plan.towers.minimax_m3 import describe_minimax_m3
from sglang.srt.plan.towers.moonvit import describe_moonvit
from sglang.srt.plan.towers.muse_glimmer import describe_muse_glimmer
from sglang.srt.plan.towers.qwen2_5_vl import describe_qwen2_5_vl
from sglang.srt.plan.towers.qwen3_vl import describe_qwen3_vl
from sglang.srt.plan.towers.step3 import describe_step3
from sglang.srt.plan.towers.tower import Tower


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """How a model takes images and videos.

    image_token, video_token: ids of the placeholders; None: the model takes none
    sections: a placeholder's position has a time, a row and a column (M-RoPE); otherwise positions count as in text
    tower: the encoder
    positions_a_second: distance in time of the frames of one run of placeholders; 0: frames are 1 apart
    both_ways: the placeholders of a run attend to each other in both directions, in layers with a window
    plain_token: the token whose per-layer embedding placeholders have
    """

    image_token: int | None
    video_token: int | None
    sections: bool
    tower: Tower
    positions_a_second: int = 0
    both_ways: bool = False
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


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the images of one `model_type`'s config."""

    describe: Callable[[ConfigReader, ConfigReader], Tower]
    """Called with the whole config and its vision_config."""
    sections: bool


_SECTIONED, _COUNTED = _Reader(describe_qwen3_vl, sections=True), _Reader(describe_moonvit, sections=False)
_GLM = _Reader(describe_glm4v, sections=True)
ENCODERS: Mapping[str, _Reader] = {
    "qwen2_5_vl": _Reader(describe_qwen2_5_vl, sections=True),
    "qwen3_vl": _SECTIONED,
    "qwen3_vl_moe": _SECTIONED,
    "qwen3_5": _SECTIONED,
    "qwen3_5_moe": _SECTIONED,
    "qwen4_exp": _SECTIONED,
    "qwen3_8_flash_next": _SECTIONED,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glm5_next": _Reader(describe_glm5_next, sections=False),
    "gemma4": _Reader(describe_gemma4, sections=False),
    "kimi_k25": _COUNTED,
    "step3p7": _Reader(describe_step3, sections=False),
    "minimax_m3_vl": _Reader(describe_minimax_m3, sections=False),
    "muse_glimmer": _Reader(describe_muse_glimmer, sections=False),
    "llama4": _Reader(describe_llama4, sections=False),
    "inkling_mm_model": _Reader(describe_inkling, sections=False),
    "deepseek_v41": _Reader(describe_deepseek_vit, sections=False),
}
"""Readers of models whose image encoder is implemented, by `model_type`; others are served for text alone."""


_IMAGE_KEYS = ("image_token_id", "media_placeholder_token_id", "image_token_index")
_VIDEO_KEYS = ("video_token_id", "video_token_index")
_UNNAMED: Mapping[str, tuple[int, int]] = {
    "muse_glimmer": (200092, 200091),
    "llama4": (200092, 0),
    "inkling_mm_model": (200054, 0),
    "deepseek_v41": (129264, 0),
}
"""The placeholders of models whose configs may leave them out, by `model_type`."""


def placeholders(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the token ids that stand for an image and for a video in the prompts of a config.json's model."""
    outer = ConfigReader(config, "config.json")
    image, video = _UNNAMED.get(str(config.get("model_type")), (0, 0))
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


def describe_media(config: Mapping[str, Any]) -> MediaDescription | None:
    """Describes a model's images and videos; None: it takes none, or its encoder is not implemented."""
    vision, reader = config.get("vision_config"), ENCODERS.get(str(config.get("model_type")))
    if reader is None or not isinstance(vision, Mapping):
        return None
    outer, inner = ConfigReader(config, "config.json"), ConfigReader(vision, "config.json vision_config")
    text = ConfigReader(outer.default("text_config", dict, {}), "config.json text_config")
    image, video = placeholders(config)
    return MediaDescription(
        image_token=image,
        video_token=video,
        sections=reader.sections,
        tower=reader.describe(outer, inner),
        positions_a_second=inner.count("tokens_per_second"),
        both_ways=text.values.get("use_bidirectional_attention") == "vision",
        plain_token=text.count("pad_token_id"),
    )
