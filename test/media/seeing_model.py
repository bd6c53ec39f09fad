"""A model directory with what the front reads of a model that sees: config, tokenizer, template and processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sglang.embedded import DEFAULT_MODEL_PATH

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_ID = 4096
VISION_START, VISION_END, IMAGE, VIDEO = range(FIRST_ID, FIRST_ID + len(SPECIAL))
PATCH, MERGE = 16, 2
TOKEN_SIDE = PATCH * MERGE
"""Pixels of a side of the square that a placeholder stands for."""
MIN_PIXELS, MAX_PIXELS = 4 * TOKEN_SIDE**2, 256 * TOKEN_SIDE**2

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "vision_config": {"patch_size": PATCH, "spatial_merge_size": MERGE, "hidden_size": 64},
}
_PIXELS = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
}


def write_seeing_model(directory: Path) -> Path:
    """Of the kind of Qwen3-VL; without weights."""
    tiny = Path(DEFAULT_MODEL_PATH)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.loads((tiny / "config.json").read_text())
    text |= {"vocab_size": FIRST_ID + 64, "model_type": "qwen3_vl_text"}
    config = {**_CONFIG, "text_config": text, "eos_token_id": text["eos_token_id"]}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": FIRST_ID + i, "content": name, **plain} for i, name in enumerate(SPECIAL)]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(tiny / "tokenizer_config.json", directory)
    shutil.copy(tiny / "generation_config.json", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    image = {**_PIXELS, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {**_PIXELS, "video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 4, "max_frames": 16}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return directory
