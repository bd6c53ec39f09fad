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
from sglang.srt.towers.pictures.processor import Processor, load_processor

_IMAGE_FILE, _VIDEO_FILE, _BOTH_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_BY_KIND = ("image", "video")


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Settings by kind. `family`: folder of the processor in `towers`; GLM has two under one model_type, which the
    files tell apart."""

    family: str
    image: Mapping[str, Any]
    video: Mapping[str, Any]


def read_processor_files(
    directory: Path, family: str, mm_process_config: str, config: Mapping[str, Any] | None = None
) -> ProcessorFiles:
    """Reads the settings. `mm_process_config`: the flag's JSON, which takes precedence. `config`: the whole
    config.json, which has the settings of models without such files. Raises UserError."""
    processor, both = load_processor(family), _optional(directory / _BOTH_FILE)
    image = processor.usual(_optional(directory / _IMAGE_FILE)) or _part(both, "image_processor")
    if not image and processor.keys is not None:
        image = dict(processor.keys(config or {}))
    video = processor.usual(_optional(directory / _VIDEO_FILE)) or _part(both, "video_processor")
    if not image:
        raise UserError(
            f"{directory} has no {_IMAGE_FILE}, which says how images are prepared for the model; add it, or serve "
            "text alone with --language-model-only."
        )
    if processor.of_config is not None:
        image = {**image, **processor.of_config(config or {})}
    changed = json.loads(mm_process_config)
    unknown = [name for name in changed if name not in _BY_KIND]
    if unknown or not all(isinstance(value, dict) for value in changed.values()):
        raise UserError(
            '--mm-process-config must hold objects for "image" and "video", such as {"image": {"max_pixels": 1048576}}.'
        )
    if processor.check is not None:
        processor.check({**image, **changed.get("image", {})})
    class_name = str(image.get("image_processor_type"))
    family = next((other for part, other in processor.other_classes.items() if part in class_name), family)
    return ProcessorFiles(
        family,
        _no_larger_than_a_step(_with_pixels(image, changed.get("image", {})), load_processor(family)),
        _with_pixels(video or image, changed.get("video", {})),
    )


def _no_larger_than_a_step(settings: dict[str, Any], processor: Processor) -> dict[str, Any]:
    """Limits the settings of images so that one fits an encoder step, as the memory plan assumes."""
    if isinstance(settings.get("max_patches"), int):
        settings = {**settings, "max_patches": min(settings["max_patches"], PATCHES_A_STEP)}
    size, patch = settings.get("size"), settings.get("patch_size")
    if not isinstance(size, dict) or not isinstance(patch, int) or "longest_edge" not in size:
        return settings
    maximum = PATCHES_A_STEP * patch**2 * (settings.get("temporal_patch_size", 2) if processor.counts_frames else 1)
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
