"""A server of a tiny Qwen3-VL with random weights: pictures over HTTP get the tokens of transformers' model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from live_server import LiveServer
from srt.models.harness import SIZES, randomize
from srt.models.media_harness import SECTIONS, TOWER

from media.pictures import data_url, encoded, picture
from media.processing import image_processor
from media.seeing_model import (
    FIRST_ID,
    IMAGE,
    PATCH,
    VIDEO,
    VISION_END,
    VISION_START,
    write_seeing_model,
)
from sglang.srt.towers.pictures.processor_files import read_processor_files

NEW_TOKENS = 12
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURES = [picture(96, 64), picture(64, 128, seed=3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    """With weights beside the tokenizer."""
    text = SIZES | {"rope_parameters": SECTIONS, "vocab_size": FIRST_ID + 64, "max_position_embeddings": 1024}
    vision = TOWER | {"deepstack_visual_indexes": [0, 2], "patch_size": PATCH}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "tie_word_embeddings": False}
    settings = copy.deepcopy({"text_config": text, "vision_config": vision, **tokens})
    config = transformers.Qwen3VLConfig(**settings)
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(made, False)
    for key, param in made.named_parameters():
        if ".visual." in key and "norm" in key:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    with torch.no_grad():
        made.lm_head.weight[FIRST_ID:] = 0.0  # nobody says a placeholder
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, model: transformers.PreTrainedModel) -> Iterator[LiveServer]:
    running = LiveServer("--model-path", str(folder), "--served-model-name", "seeing", "--context-length", "512")
    try:
        yield running.wait_up()
    finally:
        running.end()


@torch.inference_mode()
def greedy(
    model: transformers.PreTrainedModel, folder: Path, text: str, images: list[Any], output: list[int]
) -> list[int]:
    """What the model would have said where `output` stands: `output` itself, if it is the greedy continuation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    patches = [image_processor(read_processor_files(folder, "qwen3_vl", "{}"))(image) for image in images]
    counts = iter(patches)
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        ids += [token] * (next(counts).num_tokens if token == IMAGE else 1)
    whole = [*ids, *output]
    logits = model(
        torch.tensor([whole]),
        mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in whole]]),
        pixel_values=torch.cat([torch.from_numpy(patch.pixels) for patch in patches]),
        image_grid_thw=torch.tensor([patch.grid for patch in patches]),
    ).logits[0]
    said: list[int] = logits[len(ids) - 1 : -1].argmax(-1).tolist()
    return said


def test_tokens_are_those_of_transformers(
    server: LiveServer, folder: Path, model: transformers.PreTrainedModel
) -> None:
    """One picture, two in a prompt, and requests at the same time."""
    cases = [
        (f"Look: {PLACEHOLDER} What is it?", PICTURES[:1]),
        (f"{PLACEHOLDER}and{PLACEHOLDER}differ how?", PICTURES),
        (f"Look: {PLACEHOLDER} What is it?", PICTURES[1:]),
    ]

    def ask(case: tuple[str, list[Any]]) -> list[int]:
        text, images = case
        body = {"text": text, "image_data": [data_url(encoded(image)) for image in images]}
        params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/generate", json=body | {"sampling_params": params}, timeout=300)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])

    with ThreadPoolExecutor(len(cases)) as executor:
        outputs = list(executor.map(ask, cases * 2))
    for (text, images), output in zip(cases * 2, outputs, strict=True):
        assert len(output) == NEW_TOKENS and output == greedy(model, folder, text, images, output), text


def test_a_conversation_by_openai(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    part = {"type": "image_url", "image_url": {"url": data_url(encoded(PICTURES[0]))}}
    content: Any = [{"type": "text", "text": "What is this?"}, part]
    answers = [
        client.chat.completions.create(
            model="seeing", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
        )
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage is not None and answers[0].usage.prompt_tokens > 6


def test_without_the_tower_images_are_refused(folder: Path, model: transformers.PreTrainedModel) -> None:
    running = LiveServer(
        "--model-path", str(folder), "--served-model-name", "seeing", "--context-length", "512", "--language-model-only"
    )
    try:
        url = running.wait_up().url
        body = {"text": PLACEHOLDER, "image_data": data_url(encoded(PICTURES[0]))}
        refused = httpx.post(f"{url}/generate", json=body, timeout=300)
        assert refused.status_code == 400 and "--language-model-only" in refused.text, refused.text
        assert httpx.get(f"{url}/model_info").json()["has_image_understanding"] is False
    finally:
        running.end()
