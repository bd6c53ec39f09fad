"""Tokenizer and settings of images for a Qwen3-VL model with random weights: files beside its config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[2] / "python" / "sglang" / "embedded" / "tiny"
PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def write_tokenizer(folder: Path) -> int:
    """Writes the embedded model's tokenizer with MARKS behind its tokens. Returns the id of the first of them."""
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    first = max(int(token["id"]) for token in tokenizer["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": mark, **plain} for i, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 32768}))
    shutil.copy(EMBEDDED / "chat_template.jinja", folder)
    return first


def write_processors(folder: Path, shortest: int = 65536, longest: int = 16777216) -> None:
    """Writes the settings of images and videos of `shortest` to `longest` pixels."""
    pixels = PIXELS | {"size": {"shortest_edge": shortest, "longest_edge": longest}}
    pixels |= {"processor_class": "Qwen3VLProcessor"}
    of_image = pixels | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    of_video = pixels | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(of_image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(of_video))
