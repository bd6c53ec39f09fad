"""A server of a tiny DeepSeek-V4.1 as it is published, with no files of a processor and no chat template: pictures over
HTTP get the tokens of the reference in plain torch, and stand where the server's own template says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tokenizers
import torch
from live_server import LiveServer
from srt.models.v41_images import IMAGE, VISION, V41Seeing, save_v41_seeing, seen
from srt.models.v41_reference import NUM_TEXTS

from media.pictures import data_url, encoded, picture
from media.processing import image_processor
from sglang.srt.towers.pictures.processor_files import ProcessorFiles

NEW_TOKENS = 8
PLACEHOLDER = "<｜deepseek_image｜>"
PICTURE = picture(96, 61)
WORDS = [("wab", 1), ("wac", 2), ("wad", 3), ("wae", 4)]


@dataclass
class Served:
    folder: Path
    reference: V41Seeing
    server: LiveServer

    def wanted(self, output: list[int], before: int = 2) -> tuple[list[int], list[int]]:
        """The prompt of all words with the picture behind `before` of them, and what would have been said where
        `output` stands."""
        patches = image_processor(ProcessorFiles("deepseek_v41", VISION, {}))(PICTURE)
        features = seen(self.reference.text.w, VISION, torch.from_numpy(patches.pixels), *patches.grid[1:])
        ids = [token for _, token in WORDS]
        prompt = [*ids[:before], *[IMAGE] * len(features), *ids[before:]]
        logits = self.reference.text.logits([*prompt, *output], features)
        return prompt, logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("v41")
    # The placeholder takes the place of a word in capitals, and has a text of its own.
    reference = save_v41_seeing(folder, engram_compressed_vocab_size=NUM_TEXTS + 1)
    named_with_placeholder(folder / "tokenizer.json")
    server = LiveServer(
        *("--model-path", str(folder), "--max-total-tokens", "2048", "--skip-server-warmup"),
        *("--served-model-name", "v41"),
    )
    try:
        server.wait_up()
        yield Served(folder, reference, server)
    finally:
        server.end()


def named_with_placeholder(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {PLACEHOLDER if i == IMAGE else word: i for word, i in vocab.items()}
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] = [{"id": IMAGE, "content": PLACEHOLDER, **plain}]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.thorough
def test_a_picture_in_prompts_and_conversations(served: Served) -> None:
    words, url = [word for word, _ in WORDS], data_url(encoded(PICTURE))
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    ids = [token for _, token in WORDS]
    for body in (
        {"text": " ".join([*words[:2], PLACEHOLDER, *words[2:]])},
        {"input_ids": [*ids[:2], IMAGE, *ids[2:]]},
    ):
        asked = {**body, "image_data": url, "sampling_params": params}
        answer = httpx.post(f"{served.server.url}/generate", json=asked, timeout=300)
        assert answer.status_code == 200, answer.text
        prompt, said = served.wanted(answer.json()["output_ids"])
        assert answer.json()["output_ids"] == said and answer.json()["meta_info"]["prompt_tokens"] == len(prompt)
    content = [
        *({"type": "text", "text": word} for word in words[:2]),
        {"type": "image_url", "image_url": {"url": url}},
        *({"type": "text", "text": word} for word in words[2:]),
    ]
    thoughtless = {"chat_template_kwargs": {"thinking": False}}
    messages = [{"role": "user", "content": content}]
    asked = {"model": "v41", "messages": messages, "max_tokens": 2, "temperature": 0, **thoughtless}
    answer = httpx.post(f"{served.server.url}/v1/chat/completions", json=asked, timeout=300)
    assert answer.status_code == 200, answer.text
    assert "the built-in deepseek_v4.jinja for DeepseekV41ForCausalLM (edition 4.1)" in served.server.log()
    shown = "\n\n".join([*words[:2], PLACEHOLDER, *words[2:]])
    text = f"<｜begin▁of▁sentence｜><｜User｜>{shown}<｜Assistant｜></think>"
    tokens = tokenizers.Tokenizer.from_file(str(served.folder / "tokenizer.json")).encode(text).ids
    features = len(served.wanted([])[0]) - len(WORDS)
    assert tokens.count(IMAGE) == 1 and answer.json()["usage"]["prompt_tokens"] == len(tokens) - 1 + features
    body = {"input_ids": [*ids, IMAGE], "sampling_params": params}
    answer = httpx.post(f"{served.server.url}/generate", json=body, timeout=300)
    assert answer.status_code == 200 and answer.json()["meta_info"]["prompt_tokens"] == len(ids) + 1, answer.text
