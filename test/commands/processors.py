"""What a checkpoint with images brings beside its config and weights: the settings of its processors, and the tokens
that stand for pictures, in the tokenizer of the embedded model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.managers.front.media.media_tokens import media_tokens

Settings = Mapping[str, Any]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HALF: Settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN: Settings = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    **HALF,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
GLM: Settings = {
    "image_processor_type": "Glm4vImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
}
KIMI: Settings = {
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        **HALF,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    }
}
BY_FAMILY: Mapping[str, Settings] = {
    "qwen3_vl": QWEN,
    "qwen4_exp": QWEN,
    "glm4v": GLM,
    "glm5_next": GLM,
    "kimi_k25": KIMI,
    "dots3_note": {"vision_config": {**GLM, "image_processor_type": "Qwen2VLImageProcessor", **HALF}},
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "max_soft_tokens": 280,
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "num_frames": 32,
    },
    "minimax_m3": {
        "image_processor_type": "MiniMaxM3VLImageProcessor",
        "size": [672, 672],
        "patch_size": 14,
        "merge_size": 2,
        "fps": 1,
        "max_frames": 768,
    },
    "step3p7": {
        "image_processor_type": "Step3p7ImageProcessor",
        "size": {"height": 728, "width": 728},
        "patch_size": 504,
        "vision_patch_size": 14,
    },
    "muse_glimmer": {
        "image_processor_type": "MuseGlimmerImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "max_image_tokens": 4096,
        **HALF,
        "fps": 2.0,
        "num_frames": 96,
        "max_video_frame_tokens": 256,
    },
    "llama4": {
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        **HALF,
    },
    "inkling": {
        "image_processor_type": "InklingImageProcessor",
        "size": {"height": 40, "width": 40},
        "rescale_image_frac": 0.5,
        **HALF,
    },
}
"""By `MediaTokens.family`. DeepSeek-V4.1 has its own in config.json."""
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "kimi_k25": ("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    "llama4": ("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "inkling": ("<|content_image|>", "<|unused_200054|>"),
    "step3p7": ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>"),
    "muse_glimmer": ("<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>"),
    "minimax_m3": ("]<]start of image[>[", "]<]end of image[>["),
}
"""Tokens around the placeholders that are found by their text."""
FIRST_FREE = 50_000
"""An id that no token of the embedded model has."""


def write_beside(config: Settings, folder: Path) -> None:
    """Writes the tokenizer of the embedded model, with the tokens of images that the config names, and the settings of
    the processors where the model has any."""
    for name in TOKENIZER_FILES:
        shutil.copy(Path(DEFAULT_MODEL_PATH) / name, folder)
    tokens = media_tokens(config)
    if tokens is None:
        return
    if tokens.family in BY_FAMILY:
        settings = json.dumps(BY_FAMILY[tokens.family])
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            (folder / name).write_text(settings)
    ids = {tokens.image: tokens.image_text or "<|image_pad|>"}
    ids |= {number: f"<|{key}|>" for key, number in config.items() if _names_a_token(key, number) and number not in ids}
    ids |= {FIRST_FREE + i: text for i, text in enumerate(WRITTEN.get(tokens.family, ())) if text not in ids.values()}
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["model"]["vocab"] |= {text: number for number, text in ids.items()}  # added ones alone get the next ids
    tokenizer["added_tokens"] += [{"id": number, "content": text, **plain} for number, text in ids.items()]
    path.write_text(json.dumps(tokenizer))


def _names_a_token(key: str, number: object) -> bool:
    return isinstance(number, int) and key.endswith(("_token_id", "_token_index")) and "os_" not in key
