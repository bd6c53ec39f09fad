"""Small random models of transformers' classes that read images, and prompts with pictures for them."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from sglang.srt.managers.wire.io_struct import MediaItem, TokenizedGenerateReq
from sglang.srt.towers.pictures.processor import Views, load_processor
from sglang.srt.towers.pictures.processor_files import read_processor_files
from sglang.srt.utils import shared_array
from srt.managers.fake_runner import request
from srt.transformers_backend.tiny import fill_randomly

IMAGE = 250
"""The placeholder."""
TEXT_IDS = range(200, 250)
"""Tokens of the texts around images, which no other text has."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "head_dim": 16,
    "pad_token_id": 2,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_MERGED = {"scale_factor": 2}
_SPLIT = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


@dataclass(frozen=True)
class ImageClass:
    """architecture: its beginning; text: model type of its decoder; vision, more: keys of its config. processor: the
    image processor's folder in transformers, class and settings."""

    architecture: str
    text: str
    vision: dict[str, Any]
    more: dict[str, Any]
    processor: tuple[str, str, dict[str, Any]]


_CROPPED = {"size": {"height": 28, "width": 28}, "max_patches": 6}
_ANY_SIZE = {"model_type": "pixtral", "image_size": 84, "head_dim": 16}
CLASSES = {
    "aya_vision": ImageClass(
        "AyaVision", "cohere2", {"model_type": "siglip_vision_model"}, {"downsample_factor": 2},
        ("got_ocr2", "GotOcr2ImageProcessor", _CROPPED),
    ),
    "lighton_ocr": ImageClass(
        "LightOnOcr", "qwen3", _ANY_SIZE, {"spatial_merge_size": 2},
        ("pixtral", "PixtralImageProcessor", {"size": {"longest_edge": 70}, "patch_size": {"height": 14, "width": 14}}),
    ),
    "llava": ImageClass(
        "Llava", "llama", {"model_type": "clip_vision_model"}, {},
        ("clip", "CLIPImageProcessor", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    ),
    "llava, any size": ImageClass(
        "Llava", "mistral", {"model_type": "pixtral", "image_size": 56, "head_dim": 16},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        ("pixtral", "PixtralImageProcessor", {"size": {"longest_edge": 42}, "patch_size": {"height": 7, "width": 7}}),
    ),
    "idefics3": ImageClass("Idefics3", "llama", {}, _MERGED, ("idefics3", "Idefics3ImageProcessor", _SPLIT)),
    "smolvlm": ImageClass(
        "SmolVLM", "llama", {"image_size": 33}, _MERGED,
        ("smolvlm", "SmolVLMImageProcessor", {"size": {"longest_edge": 66}, "max_image_size": {"longest_edge": 33}}),
    ),
    "internvl": ImageClass(
        "InternVL", "qwen2", {"image_size": [28, 28], "patch_size": [7, 7]}, {"downsample_ratio": 0.5},
        ("got_ocr2", "GotOcr2ImageProcessor", _CROPPED),
    ),
    "mistral3": ImageClass(
        "Mistral3", "mistral", _ANY_SIZE, {"spatial_merge_size": 2},
        ("pixtral", "PixtralImageProcessor", {"size": {"longest_edge": 70}, "patch_size": {"height": 14, "width": 14}}),
    ),
}  # fmt: skip


def save_image_class(name: str, folder: Path, **of_text: Any) -> Any:
    """Saves a random model in fp32 with the settings of its image processor, and returns it."""
    kind = CLASSES[name]
    config = getattr(transformers, f"{kind.architecture}Config")(
        text_config={"model_type": kind.text, **_TEXT, **of_text},
        vision_config=_VISION | kind.vision,
        image_token_id=IMAGE,
        **kind.more,
    )
    config.image_token_index = config.image_token_id = IMAGE
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.architecture}ForConditionalGeneration")(config).float().eval()
    fill_randomly(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[TEXT_IDS.start :] = 0.0  # nobody says a placeholder
    model.save_pretrained(folder)
    _, processor, settings = kind.processor
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor, **settings}))
    return model


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Returns a picture of random colours in large squares."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def views_of(folder: Path, image: Image.Image) -> Views:
    """Returns what our processor makes of a picture."""
    config = json.loads((folder / "config.json").read_text())
    files = read_processor_files(folder, "transformers_class", "{}", config)
    return load_processor(files.family).views(files.image, "float32")(image)


@dataclass
class ShownPrompt:
    """Token ids with placeholders, and the pictures that they stand for."""

    name: str
    folder: Path
    ids: list[int] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    seen: list[tuple[Views, list[tuple[int, int]]]] = field(default_factory=list)

    def text(self, count: int, seed: int) -> ShownPrompt:
        self.ids += torch.randint(3, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        return self

    def image(self, seed: int, width: int, height: int) -> ShownPrompt:
        shown = picture(seed, width, height)
        views, runs = views_of(self.folder, shown), []
        for part in views.parts:
            if isinstance(part, int):
                runs.append((len(self.ids), len(self.ids) + part))
                self.ids += [IMAGE] * part
            else:
                self.ids.append(TEXT_IDS[sum(part.encode()) % len(TEXT_IDS)])
        self.pictures.append(shown)
        self.seen.append((views, runs))
        return self

    def request(self, rid: str, new_tokens: int) -> TokenizedGenerateReq:
        message = request(rid, self.ids, new_tokens, temperature=0.0, ignore_eos=True)
        message.media = [
            MediaItem(
                kind="image",
                digest=hashlib.sha256(views.patches[0].pixels.tobytes()).digest(),
                spans=runs,
                grid=views.patches[0].grid,
                pixels=shared_array.write(self.folder, views.patches[0].pixels),
            )
            for views, runs in self.seen
        ]
        return message

    def of_transformers(self) -> dict[str, torch.Tensor]:
        """Returns what the class takes beside ids, as transformers' own image processor makes it."""
        if not self.pictures:
            return {}
        folder, name, settings = CLASSES[self.name].processor
        module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
        more = {"crop_to_patches": True} if folder == "got_ocr2" else {}
        made = getattr(module, f"{name}Pil")(**settings)([self.pictures], return_tensors="pt", **more)
        return {key: value for key, value in made.items() if key != "num_patches"}


@torch.inference_mode()
def generated(model: Any, prompt: ShownPrompt, new_tokens: int, behind: Sequence[int] = ()) -> list[int]:
    """Returns what the class's own `generate` says behind a prompt, and behind an answer to it."""
    ids = torch.tensor([[*prompt.ids, *behind]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1,
        **prompt.of_transformers(),
    )  # fmt: skip
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens
