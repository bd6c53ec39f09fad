"""Servers of tiny models in the published layouts of GLM-4.5V and Gemma 4: pictures and MP4 files over HTTP get the
tokens of transformers' models."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from live_server import LiveServer
from srt.models.harness import SIZES, randomize
from srt.models.media_harness import GEMMA_VISION, GLM_ROPE, GLM_VISION, SEEING, TOWER

from media.moving_pictures import video_file
from media.pictures import data_url, encoded, picture
from media.seeing_model import FIRST_ID, TEMPLATE, write_seeing_model
from sglang.srt.managers.front.media.containers import open_video
from sglang.srt.managers.front.media.processor_files import ProcessorFiles, read_processor_files
from sglang.srt.managers.front.media.processors import Patches, image_processor
from sglang.srt.managers.front.media.video_processors import video_processor

NEW_TOKENS = 12
PICTURE, MOVIE = picture(96, 64), video_file()
OF_QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")


@dataclass(frozen=True)
class Published:
    """`special`: tokens behind those of text; `image`, `video`: what templates write."""

    name: str
    special: tuple[str, ...]
    image: str
    video: str
    config: dict[str, str]
    vision: dict[str, Any]
    text: dict[str, Any]
    processor: dict[str, Any]
    video_processor: dict[str, Any]


GLM_MARKS = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)
PUBLISHED = {
    "glm4v_moe": Published(
        "glm4v_moe",
        GLM_MARKS,
        "".join((GLM_MARKS[0], GLM_MARKS[2], GLM_MARKS[1])),
        "".join((GLM_MARKS[3], GLM_MARKS[5], GLM_MARKS[4])),
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": GLM_MARKS[0]},
        TOWER | GLM_VISION | {"patch_size": 14, "image_size": 112},
        {"rope_parameters": GLM_ROPE},
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2}
        | {"size": {"shortest_edge": 3136, "longest_edge": 1 << 17}},
        {"fps": 2, "size": {"shortest_edge": 3136, "longest_edge": 1 << 17}},
    ),
    "gemma4": Published(
        "gemma4",
        ("<|image|>", "<|video|>", "<|image>", "<image|>"),
        "<|image|>",
        "<|video|>",
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "boi_token_id": "<|image>"}
        | {"eoi_token_id": "<image|>"},
        GEMMA_VISION | {"patch_size": 16, "pooling_kernel_size": 3, "standardize": True},
        {},
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "pooling_kernel_size": 3}
        | {"patch_size": 16, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        {"num_frames": 3, "max_soft_tokens": 70},
    ),
}


def write_model(form: Published, folder: Path) -> transformers.PreTrainedModel:
    """A checkpoint as it is published, with random weights."""
    write_seeing_model(folder)
    ids = {token: FIRST_ID + number for number, token in enumerate(form.special)}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    kept = [token for token in tokenizer["added_tokens"] if token["id"] < FIRST_ID]
    tokenizer["added_tokens"] = kept + [{"id": number, "content": token, **plain} for token, number in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE.replace(OF_QWEN[0], form.image).replace(OF_QWEN[1], form.video)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(form.processor))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(form.processor | form.video_processor))
    class_name, text, _, _ = SEEING[form.name]
    text = SIZES | text | form.text | {"vocab_size": FIRST_ID + 64, "max_position_embeddings": 1024}
    text |= {"vocab_size_per_layer_input": FIRST_ID + 64} if form.name == "gemma4" else {}
    named = {key: ids[token] for key, token in form.config.items()}
    settings = copy.deepcopy({"text_config": text, "vision_config": form.vision, **named})
    settings |= {"audio_config": None, "audio_token_id": FIRST_ID + 63} if form.name == "gemma4" else {}
    config = getattr(transformers, class_name)(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, False)
    for key, param in model.named_parameters():
        if ("visual." in key or "vision_tower." in key) and "norm" in key:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    for key, buffer in model.named_buffers():
        if "vision_tower.std_" in key:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    with torch.no_grad():
        model.lm_head.weight[FIRST_ID:] = 0.0  # nobody says a placeholder
    model.save_pretrained(folder)
    return model


class Served:
    def __init__(self, form: Published, folder: Path) -> None:
        self.form, self.folder = form, folder
        self.model = write_model(form, folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.files: ProcessorFiles = read_processor_files(folder, form.name.removesuffix("_moe"), "{}")
        self.server = LiveServer(
            *("--model-path", str(folder), "--served-model-name", "seeing", "--dtype", "float32"),
            *("--max-total-tokens", "4096", "--skip-server-warmup"),
        )

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def of_image(self) -> tuple[list[int], Patches]:
        patches = image_processor(self.files)(PICTURE)
        run = "<|image|>" * patches.num_tokens
        return self.ids(f"<|image>{run}<image|>" if self.form.name == "gemma4" else run), patches

    def of_video(self) -> tuple[list[int], Patches]:
        """Written as transformers' processors write it."""
        processor = video_processor(self.files)
        assert processor is not None
        result = processor(open_video(MOVIE))
        count = result.patches.num_tokens // len(result.times)
        if self.form.name == "gemma4":
            clocks = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in result.times]
            text = " ".join(f"{clock} <|image>{'<|video|>' * count}<image|>" for clock in clocks)
        else:
            frame = f"<|begin_of_image|>{'<|image|>' * count}<|end_of_image|>"
            text = "".join(f"{frame}{int(time)}" for time in result.times)
        return self.ids(text), result.patches

    def greedy(self, kind: str, output: list[int]) -> list[int]:
        """What the model would have said where `output` stands behind `Look: PLACEHOLDER What is it?`."""
        before, after = self.ids("Look: "), self.ids(" What is it?")
        media, patches = self.of_image() if kind == "image" else self.of_video()
        if self.form.name == "glm4v_moe":
            marks = [self.ids(mark) for mark in (GLM_MARKS[:2] if kind == "image" else GLM_MARKS[3:5])]
            media = [*marks[0], *media, *marks[1]]
        prompt = [*before, *media, *after]
        whole = torch.tensor([[*prompt, *output]])
        placeholder = self.ids("<|video|>" if kind == "video" and self.form.name == "gemma4" else "<|image|>")[0]
        types = (whole == placeholder).int() * (1 if kind == "image" else 2)
        logits = self.model(whole, mm_token_type_ids=types, **self.inputs(kind, patches)).logits[0]
        said: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return said

    def inputs(self, kind: str, patches: Patches) -> dict[str, torch.Tensor]:
        pixels, (frames, rows, columns) = torch.from_numpy(patches.pixels), patches.grid
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        if self.form.name != "gemma4":
            return {name: pixels, f"{kind}_grid_thw": torch.tensor([patches.grid])}
        down, right = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = torch.stack((right.flatten(), down.flatten()), dim=-1).expand(frames, -1, -1)
        pixels = pixels.unflatten(0, (frames, -1))
        return {name: pixels if kind == "image" else pixels[None]} | {
            f"{kind}_position_ids": places if kind == "image" else places[None]
        }


@pytest.fixture(scope="module", params=["gemma4", pytest.param("glm4v_moe", marks=pytest.mark.thorough)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(PUBLISHED[request.param], tmp_path_factory.mktemp(request.param))
    try:
        served.server.wait_up()
        yield served
    finally:
        served.server.end()


@torch.inference_mode()
def test_tokens_are_those_of_transformers(served: Served) -> None:
    for kind, url in (("image", data_url(encoded(PICTURE))), ("video", data_url(MOVIE, "video/mp4"))):
        placeholder = served.form.image if kind == "image" else served.form.video
        body = {"text": f"Look: {placeholder} What is it?", f"{kind}_data": url}
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{served.server.url}/generate", json=body | {"sampling_params": params}, timeout=120)
        assert answer.status_code == 200, answer.text
        output = answer.json()["output_ids"]
        assert len(output) == NEW_TOKENS and output == served.greedy(kind, output), kind


def test_a_conversation_by_openai(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0, timeout=120)
    content: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": data_url(encoded(PICTURE))}},
        {"type": "video_url", "video_url": {"url": data_url(MOVIE, "video/mp4")}},
    ]
    answer = client.chat.completions.create(
        model="seeing", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
    )
    expected = len(served.of_image()[0]) + len(served.of_video()[0])
    assert answer.usage is not None and answer.usage.prompt_tokens > expected


def test_a_damaged_video_is_refused(served: Served) -> None:
    body = {"text": served.form.video, "video_data": data_url(MOVIE[: len(MOVIE) // 2], "video/mp4")}
    answer = httpx.post(f"{served.server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "damaged" in answer.text, answer.text
