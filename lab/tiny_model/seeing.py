"""The embedded model with eyes as files: the finished text model in the form of Qwen3-VL's mixtures of experts, and the
tower that `eyes` trained.

The text model's weights are the same numbers under other names; the matrices of a layer's experts are one tensor each,
with input by output, as Qwen publishes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tiny_model.layout import IMAGE_SECTIONS, IMAGE_TOKENS, VISION_CONFIG, write_json

WEIGHTS_FILE, VISION_FILE = "model.safetensors", "vision.safetensors"
_COPIED = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 80 * 64}
"""Pixels of an image: a square has 64 a side whatever its size, so that the encoder sees what it was trained on."""


def seeing_tokenizer(file: Path) -> dict[str, Any]:
    """The tokenizer with the placeholders of images, in place of bytes that no text has."""
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [
        {"id": vocabulary[byte], "content": name, **plain} for byte, name in IMAGE_TOKENS.items() if byte in vocabulary
    ]
    tokenizer["model"]["vocab"] = {IMAGE_TOKENS.get(text, text): number for text, number in vocabulary.items()}
    tokenizer["added_tokens"] = added + tokenizer["added_tokens"]
    return tokenizer


def read_seeing_tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(seeing_tokenizer(file)))


def seeing_config(text: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """`text`: the text model's config.json."""
    inner = {name: value for name, value in text.items() if name not in ("architectures", "rope_theta", "rope_scaling")}
    rotary = {"rope_type": "default", "rope_theta": text["rope_theta"]}
    rotary |= {"mrope_section": list(IMAGE_SECTIONS), "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "text_config": {**inner, "model_type": "qwen3_vl_moe_text", "rope_parameters": rotary},
        "vision_config": VISION_CONFIG,
    }


def image_settings() -> dict[str, Any]:
    """preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": VISION_CONFIG["patch_size"],
        "temporal_patch_size": VISION_CONFIG["temporal_patch_size"],
        "merge_size": VISION_CONFIG["spatial_merge_size"],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": PIXELS,
    }


def seeing_weights(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """The text model's weights under the names of the decoder, its experts stacked."""
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in text.items():
        below, found, rest = name.removeprefix("model.").partition(".mlp.experts.")
        if found:
            number, part, _ = rest.split(".")
            experts.setdefault(f"model.language_model.{below}{found}", {})[part, int(number)] = tensor
        else:
            named[f"model.language_model.{below}"] = tensor
    for at, parts in experts.items():
        count = 1 + max(number for _, number in parts)
        gate, up, down = (
            torch.stack([parts[part, number] for number in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        named[f"{at}gate_up_proj"] = torch.cat((gate, up), dim=1).mT.contiguous()
        named[f"{at}down_proj"] = down.mT.contiguous()
    return named


def write_seeing(text: Path, vision: Path, output: Path) -> None:
    """text: the directory of the text model; vision: the tower's file. Writes a directory that is served as it is."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = seeing_tokenizer(text / "tokenizer.json")
    content = json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n"
    (output / "tokenizer.json").write_text(content, encoding="utf-8")
    for name in _COPIED:
        shutil.copyfile(text / name, output / name)
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    write_json(output / "config.json", seeing_config(config, Tokenizer.from_str(json.dumps(tokenizer))))
    write_json(output / "preprocessor_config.json", image_settings())
    weights = seeing_weights(load_file(str(text / WEIGHTS_FILE))) | load_file(str(vision))
    save_file(weights, str(output / WEIGHTS_FILE), metadata={"format": "pt"})
    (output / WEIGHTS_FILE).chmod(0o644)
