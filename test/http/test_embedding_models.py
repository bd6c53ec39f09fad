"""A checkpoint as embedding models are published: names of tensors that begin at the layers, no output head, and a
tokenizer that ends each text with a token, whose state is the embedding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from live_server import LiveServer, live_server
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

from sglang.embedded import DEFAULT_MODEL_PATH

TEXTS = ["The capital of France is Paris.", "Sort 3, 1, 2.", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedding-model")
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(made)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3Model(config).save_pretrained(made)
    written = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**written, "architectures": ["Qwen3ForCausalLM"]}))
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[LiveServer]:
    with live_server("--model-path", str(folder), "--is-embedding") as running:
        yield running


def test_the_embeddings_are_those_of_transformers(served: LiveServer, folder: Path) -> None:
    answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": "x", "input": TEXTS}, timeout=300).json()
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(entry["embedding"], expected, atol=1e-5)


def test_without_the_flag_the_missing_head_is_named(folder: Path) -> None:
    server = LiveServer("--model-path", str(folder))
    assert server.wait_exit() == 2
    assert "lacks weights of the model: lm_head.weight" in server.log() and "--is-embedding" in server.log()
