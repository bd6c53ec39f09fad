"""A server of a tiny DeepSeek-V4 with images as its vision edition is published, with no files of a processor and no
chat template: a picture over HTTP gets the tokens of the reference, behind as many that fill the prompt as its place
takes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from live_server import LiveServer
from srt.models.v4_images import FLAT, ids_of, save_v4_seeing, spans_of
from srt.models.v41_images import Picture
from srt.models.v41_reference import tokenizer

from media.pictures import data_url, encoded, picture
from media.processing import image_processor
from media.test_v41_served import PLACEHOLDER, named_with_placeholder
from sglang.srt.towers.deepseek_v4.spec import flat_keys
from sglang.srt.towers.pictures.patches import Patches
from sglang.srt.towers.pictures.processor_files import ProcessorFiles

PICTURE = picture(48, 32)
WORDS = [("wab", 1), ("wac", 2), ("wad", 3), ("wae", 4)]


@cache
def patches() -> Patches:
    return image_processor(ProcessorFiles("deepseek_v4", dict(flat_keys(FLAT) or {}), {}))(PICTURE)


class Prepared(Picture):
    """The patches that the server's processor makes of the picture."""

    @property
    def pixels(self) -> torch.Tensor:
        return torch.from_numpy(patches().pixels)


@pytest.mark.thorough
def test_a_picture_in_prompts_and_conversations(tmp_path: Path) -> None:
    folder = tmp_path / "DeepSeek-V4-Flash-Vision-Exp"
    reference = save_v4_seeing(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    named_with_placeholder(folder / "tokenizer.json")
    shown = Prepared(*patches().grid[1:])
    server = LiveServer(
        *("--model-path", str(folder), "--max-total-tokens", "2048", "--skip-server-warmup"),
        *("--served-model-name", "v4"),
    )
    try:
        server.wait_up()
        words, url = [word for word, _ in WORDS], data_url(encoded(PICTURE))
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        for before in (0, 3):
            text = " ".join([*words[:before], PLACEHOLDER, *words[before:]])
            asked = {"text": text, "image_data": url, "sampling_params": params}
            answer = httpx.post(f"{server.url}/generate", json=asked, timeout=300)
            assert answer.status_code == 200, answer.text
            ids = [token for _, token in WORDS]
            prompt = [*ids[:before], shown, *ids[before:]]
            said = answer.json()["output_ids"]
            assert said == reference.greedy(prompt, said)
            assert answer.json()["meta_info"]["prompt_tokens"] == len(ids_of(prompt))
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "wab"}]
        body = {"model": "v4", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert "the built-in deepseek_v4.jinja for DeepseekV4ForCausalLM (edition vision)" in server.log()
        ((_, _, mark, end),) = spans_of([shown])
        assert answer.json()["usage"]["prompt_tokens"] >= end - mark
    finally:
        server.end()
