"""Servers of an embedding model and of a cross-encoder that a class of transformers computes, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
from live_server import LiveServer, live_server
from srt.transformers_backend.found_facts import find_facts
from srt.transformers_backend.test_text_forms import write_modules
from srt.transformers_backend.text_classes import expected, save_text_model
from transformers import PreTrainedTokenizerFast

from sglang.srt.plan.transformers_backend.facts import CLASSIFY, EMBED

WORDS = [f"w{number}" for number in range(240)]
QUERY, DOCUMENTS = "w1 w2 w3", ["w9 w8", "w2 w3 w4 w5 w6", "w100"]


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Words of a small vocabulary, in the frame of BERT's texts and pairs."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rust.add_special_tokens(special)
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, **named)
    tokenizer.save_pretrained(folder)
    return tokenizer


class Served:
    """A server, with the model as transformers reads it."""

    def __init__(self, server: LiveServer, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        self.server, self.model, self.tokenizer = server, model, tokenizer

    def post(self, path: str, **body: Any) -> Any:
        reply = httpx.post(self.server.url + path, json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, **body: Any) -> str:
        reply = httpx.post(self.server.url + path, json=body, timeout=300)
        assert reply.status_code == 400
        return reply.text


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As all-MiniLM, without the last module: embeddings keep their lengths."""
    folder = tmp_path_factory.mktemp("embedder")
    model = save_text_model("bert", EMBED, folder)
    tokenizer = save_tokenizer(folder)
    write_modules(folder, "mean_tokens", normalizes=False)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    find_facts(folder, is_embedding=True)
    flags = ("--is-embedding", "--allow-auto-truncate", "--enable-metrics")
    with live_server("--model-path", str(folder), *flags) as up:
        yield Served(up, model, tokenizer)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranker")
    model = save_text_model("bert", CLASSIFY, folder, num_labels=1)
    tokenizer = save_tokenizer(folder)
    find_facts(folder, is_embedding=True)
    with live_server("--model-path", str(folder), "--is-embedding") as up:
        yield Served(up, model, tokenizer)


@pytest.mark.parametrize("dimensions", [None, 8])
def test_embeddings(embedder: Served, dimensions: int | None) -> None:
    """Of texts and of token ids. A text that is too long is cut, and keeps the token that ends every text."""
    texts = [*DOCUMENTS, " ".join(WORDS[:40])]
    ids = [embedder.tokenizer(text)["input_ids"] for text in texts]
    ids[3] = [*ids[3][:15], 3]
    want = torch.stack([expected(embedder.model, EMBED, each, "mean") for each in ids])[:, :dimensions]
    options: Any = {} if dimensions is None else {"dimensions": dimensions}
    with openai.OpenAI(base_url=f"{embedder.server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        for given in (texts, ids):
            answer = client.embeddings.create(model="any", input=given, **options)
            np.testing.assert_allclose([entry.embedding for entry in answer.data], want, atol=1e-4)
            assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert client.models.list().data[0].model_dump()["max_model_len"] == 16
    text = httpx.get(f"{embedder.server.url}/metrics").text
    assert "prompt_tokens_total" in text


def test_ranks_by_embeddings(embedder: Served) -> None:
    made = [expected(embedder.model, EMBED, embedder.tokenizer(text)["input_ids"], "mean") for text in DOCUMENTS]
    query = expected(embedder.model, EMBED, embedder.tokenizer(QUERY)["input_ids"], "mean")
    cosines = [float(torch.cosine_similarity(query, each, dim=0)) for each in made]
    ranked = embedder.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda i: -cosines[i])
    np.testing.assert_allclose([entry["score"] for entry in ranked], sorted(cosines, reverse=True), atol=1e-4)


def scores(served: Served, *, reverse: bool = False) -> list[float]:
    with torch.inference_mode():
        texts = [(document, QUERY) if reverse else (QUERY, document) for document in DOCUMENTS]
        rows = [served.tokenizer(*pair, return_tensors="pt", return_token_type_ids=True) for pair in texts]
        return [float(served.model(**row).logits[0, 0]) for row in rows]


def test_a_cross_encoder_scores_documents_beside_the_query(ranker: Served) -> None:
    want = [float(np.exp(-np.logaddexp(0, -score))) for score in scores(ranker)]
    order = sorted(range(3), key=lambda i: -want[i])
    ranked = ranker.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [entry["index"] for entry in ranked] == order
    np.testing.assert_allclose([entry["score"] for entry in ranked], [want[i] for i in order], atol=1e-5)
    results = ranker.post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    assert [entry["index"] for entry in results] == order[:2]
    of_items = ranker.post("/v1/score", query=QUERY, items=DOCUMENTS)["scores"]
    np.testing.assert_allclose(of_items, [[score] for score in want], atol=1e-5)
    first = ranker.post("/v1/score", query=QUERY, items=DOCUMENTS, item_first=True)["scores"]
    reverse = [float(np.exp(-np.logaddexp(0, -score))) for score in scores(ranker, reverse=True)]
    np.testing.assert_allclose(first, [[score] for score in reverse], atol=1e-5)


def test_classes(ranker: Served) -> None:
    """In the forms of OpenAI's endpoints and of `/encode`."""
    ids = ranker.tokenizer(QUERY)["input_ids"]
    score = float(expected(ranker.model, CLASSIFY, ids, "first")[0])
    answer = ranker.post("/v1/classify", input=[QUERY])
    (entry,) = answer["data"]
    assert entry["label"] == "LABEL_0" and entry["num_classes"] == 1 and answer["usage"]["prompt_tokens"] == len(ids)
    np.testing.assert_allclose(entry["probs"], [np.exp(-np.logaddexp(0, -score))], atol=1e-5)
    for body in ({"text": QUERY}, {"input_ids": ids}):
        np.testing.assert_allclose(ranker.post("/classify", **body)["embedding"], [score], atol=1e-4)


def test_what_is_refused(ranker: Served, embedder: Served) -> None:
    assert "makes no embeddings" in ranker.refused("/v1/embeddings", input="w1")
    assert "scores its own labels" in ranker.refused("/v1/score", query="a", items=["b"], label_token_ids=[1])
    assert "no classification head" in embedder.refused("/v1/classify", input="w1")
    chat = {"model": "any", "messages": [{"role": "user", "content": "w1"}]}
    for served in (ranker, embedder):
        assert "--is-embedding" in served.refused("/generate", text="w1")
        assert "--is-embedding" in served.refused("/v1/chat/completions", **chat)
        assert httpx.get(f"{served.server.url}/health_generate").status_code == 200
    assert "longer than the model's context length" in ranker.refused("/classify", input=" ".join(WORDS + WORDS[:40]))
