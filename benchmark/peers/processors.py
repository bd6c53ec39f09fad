"""How a Qwen3-VL model with random weights prepares images: files beside its config.json, which no checkpoint brings."""

from __future__ import annotations

import json
from pathlib import Path

PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_processors(folder: Path, shortest: int = 65536, longest: int = 16777216) -> None:
    """Writes the settings of images and videos of `shortest` to `longest` pixels."""
    pixels = PIXELS | {"size": {"shortest_edge": shortest, "longest_edge": longest}}
    pixels |= {"processor_class": "Qwen3VLProcessor"}
    of_image = pixels | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    of_video = pixels | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(of_image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(of_video))
