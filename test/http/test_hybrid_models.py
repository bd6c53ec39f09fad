"""The text half of a multimodal hybrid, served: texts are answered, and images refused by every form of request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import live_server
from srt.models import harness
from srt.models.test_hybrid import multimodal

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.hf_config import read_config

IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    text, both = (tmp_path_factory.mktemp(name) for name in ("text", "both"))
    kind, changes = harness.TINY["qwen3_5"]
    vocab = read_config(Path(DEFAULT_MODEL_PATH))["vocab_size"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(harness.TINY, "with_tokenizer", (kind, changes | {"vocab_size": vocab}))
        patch.setattr(harness, "ZERO_CENTRED", harness.ZERO_CENTRED | {"with_tokenizer"})
        harness.save_tiny("with_tokenizer", text)
    multimodal("qwen3_5", text, both)
    for file in Path(DEFAULT_MODEL_PATH).glob("*token*"):
        shutil.copy(file, both)
    with (
        live_server("--model-path", str(both), "--language-model-only") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "image_data": IMAGE}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
        ),
    ],
)
def test_images_are_refused(hybrid: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = hybrid.post(path, json={"model": "default", **body})
    assert answer.status_code == 400 and "--language-model-only" in answer.text, answer.text


def test_texts_are_answered(hybrid: httpx.Client) -> None:
    body = {"text": "a b c", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    answers = [hybrid.post("/generate", json=body).json() for _ in range(2)]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [4, 4]
