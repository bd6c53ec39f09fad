"""Reads the settings of a model's processors from the files beside its weights.

A directory has `processor_config.json` with all of them, or `preprocessor_config.json` and
`video_preprocessor_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.errors import UserError
from sglang.srt.plan.media import PATCHES_A_STEP

_IMAGE_FILE, _VIDEO_FILE, _BOTH_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_BY_KIND = ("image", "video")


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Settings by kind. `family`: one of those in `processors`; GLM has two under one model_type, which the files tell
    apart."""

    family: str
    image: Mapping[str, Any]
    video: Mapping[str, Any]


def read_processor_files(
    directory: Path, family: str, mm_process_config: str, config: Mapping[str, Any] | None = None
) -> ProcessorFiles:
    """Reads the settings. `mm_process_config`: the flag's JSON, which takes precedence. `config`: the whole
    config.json, which has the settings of models without such files. Raises UserError."""
    both = _optional(directory / _BOTH_FILE)
    image = _transformers_keys(_optional(directory / _IMAGE_FILE)) or _part(both, "image_processor")
    if not image and family in _IN_CONFIG:
        image = dict(_part(config or {}, "vision_config"))
    video = _transformers_keys(_optional(directory / _VIDEO_FILE)) or _part(both, "video_processor")
    if not image:
        raise UserError(
            f"{directory} has no {_IMAGE_FILE}, which says how images are prepared for the model; add it, or serve "
            "text alone with --language-model-only."
        )
    changed = json.loads(mm_process_config)
    unknown = [name for name in changed if name not in _BY_KIND]
    if unknown or not all(isinstance(value, dict) for value in changed.values()):
        raise UserError(
            '--mm-process-config must hold objects for "image" and "video", such as {"image": {"max_pixels": 1048576}}.'
        )
    if family in _IN_CONFIG:
        _check_tokens({**image, **changed.get("image", {})})
    if "Glm46V" in str(image.get("image_processor_type")):
        family = "glm46v"
    return ProcessorFiles(
        family,
        _no_larger_than_a_step(_with_pixels(image, changed.get("image", {})), family),
        _with_pixels(video or image, changed.get("video", {})),
    )


_OF_KIMI = "media_proc_cfg"
_IN_CONFIG = ("deepseek_v41",)
"""Families whose vision_config contains the settings of their processors."""


def _transformers_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, with the keys of published Kimi K2.5 checkpoints renamed to those of transformers."""
    published = _part(settings, _OF_KIMI)
    if not published:
        return dict(settings)
    if published.get("fixed_output_tokens") is not None:
        raise UserError(
            f"{_IMAGE_FILE}: {_OF_KIMI}.fixed_output_tokens is not supported; serve text with --language-model-only."
        )
    words = {
        "in_patch_limit": "max_patches",
        "merge_kernel_size": "merge_size",
        "max_num_frames_each_video": "max_frames",
    }
    usual = {words.get(name, name): value for name, value in published.items()}
    side = usual.pop("patch_limit_on_one_side", None)
    return usual if side is None else {**usual, "size": {"max_height": side, "max_width": side}}


_MIN_TOKENS = 4
"""Tokens of the smallest image of DeepSeek-V4.1: one of its patches, and those around it."""


def _check_tokens(settings: Mapping[str, Any]) -> None:
    maximum = settings.get("max_image_tokens", _MIN_TOKENS)
    if type(maximum) is not int or maximum < _MIN_TOKENS:
        raise UserError(f"max_image_tokens must be a whole number from {_MIN_TOKENS} on; got {maximum!r}.")
    if "max_pixels" in settings:
        raise UserError("This model limits an image by its tokens; use max_image_tokens in place of max_pixels.")


_COUNTED_PER_FRAME = ("glm4v", "glm46v")
"""Families whose limits count the pixels of an image once for each of the frames that it stands for."""


def _no_larger_than_a_step(settings: dict[str, Any], family: str) -> dict[str, Any]:
    """Limits the settings of images so that one fits an encoder step, as the memory plan assumes."""
    if isinstance(settings.get("max_patches"), int):
        settings = {**settings, "max_patches": min(settings["max_patches"], PATCHES_A_STEP)}
    size, patch = settings.get("size"), settings.get("patch_size")
    if not isinstance(size, dict) or not isinstance(patch, int) or "longest_edge" not in size:
        return settings
    maximum = (
        PATCHES_A_STEP * patch**2 * (settings.get("temporal_patch_size", 2) if family in _COUNTED_PER_FRAME else 1)
    )
    return {**settings, "size": {**size, "longest_edge": min(size["longest_edge"], maximum)}}


def _with_pixels(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with changes; `min_pixels` and `max_pixels` are other names of the two edges of `size`."""
    merged = {**settings, **changed}
    edges = {"shortest_edge": merged.get("min_pixels"), "longest_edge": merged.get("max_pixels")}
    given = {name: value for name, value in edges.items() if value is not None}
    if given and isinstance(merged.get("size", {}), dict):
        merged["size"] = {**merged.get("size", {}), **given}
    return merged


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _part(both: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = both.get(name)
    return part if isinstance(part, dict) else {}
