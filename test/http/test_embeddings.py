"""Embeddings through the `openai` client, scores and ranks, against transformers on the embedded model."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from live_server import LiveServer, live_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.embedded import DEFAULT_MODEL_PATH

TEXTS = ["The capital of France is Paris.", "Sort 3, 1, 2.", "The capital of France is"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[LiveServer]:
    """Prompts are computed in chunks."""
    with live_server("--is-embedding", "--chunked-prefill-size", "16") as running:
        yield running


class Reference:
    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def embedding(self, ids: list[int], dimensions: int | None = None) -> np.ndarray:
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0, -1, :dimensions]
        return torch.nn.functional.normalize(hidden, dim=0).numpy()

    def next_token(self, ids: list[int]) -> torch.Tensor:
        """Probabilities."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0, -1].softmax(-1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300)


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("dimensions", [None, 8])
@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("generates", [False, True])
def test_embeddings(
    server: LiveServer,
    embedder: LiveServer,
    reference: Reference,
    dimensions: int | None,
    encoding: Any,
    generates: bool,
) -> None:
    """A server that generates has them, too. The client itself asks for base64 if the caller says nothing."""
    options: Any = {} if dimensions is None else {"dimensions": dimensions}
    with client(server if generates else embedder) as connected:
        for _ in range(2):  # the second time from the prefix cache
            answer = connected.embeddings.create(model="any", input=TEXTS, encoding_format=encoding, **options)
            assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.model == "any"
            for entry, text in zip(answer.data, TEXTS, strict=True):
                values: Any = entry.embedding
                if encoding == "base64":
                    values = np.frombuffer(base64.b64decode(values), "<f4")
                expected = reference.embedding(reference.ids(text), dimensions)
                np.testing.assert_allclose(values, expected, atol=1e-5)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(reference.ids(t)) for t in TEXTS)


def test_default_encoding_of_the_client(embedder: LiveServer, reference: Reference) -> None:
    with client(embedder) as connected:
        (entry,) = connected.embeddings.create(model="any", input=TEXTS[0]).data
    np.testing.assert_allclose(entry.embedding, reference.embedding(reference.ids(TEXTS[0])), atol=1e-5)


def test_token_ids_are_the_text(embedder: LiveServer, reference: Reference) -> None:
    ids = [reference.ids(text) for text in TEXTS]
    whole = [entry["embedding"] for entry in post(embedder, "/v1/embeddings", input=ids).json()["data"]]
    np.testing.assert_allclose(whole, [reference.embedding(entry) for entry in ids], atol=1e-5)
    (single,) = post(embedder, "/v1/embeddings", input=ids[0]).json()["data"]
    np.testing.assert_allclose(single["embedding"], whole[0], atol=1e-5)


def test_encode(embedder: LiveServer, reference: Reference) -> None:
    expected = [reference.embedding(reference.ids(text)) for text in TEXTS]
    results = post(embedder, "/encode", text=TEXTS).json()
    np.testing.assert_allclose([result["embedding"] for result in results], expected, atol=1e-5)
    single = post(embedder, "/encode", input_ids=reference.ids(TEXTS[1]), rid="mine").json()
    np.testing.assert_allclose(single["embedding"], expected[1], atol=1e-5)
    assert single["meta_info"]["id"] == "mine" and single["meta_info"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/score"])
def test_a_server_of_embeddings_does_not_generate(embedder: LiveServer, path: str) -> None:
    body = {"text": "a", "prompt": "a", "query": "a", "items": "b", "label_token_ids": [1]}
    reply = post(embedder, path, **body)
    assert reply.status_code == 400 and "--is-embedding" in reply.text
    assert httpx.get(f"{embedder.url}/model_info").json()["is_generation"] is False
    assert httpx.get(f"{embedder.url}/health_generate").status_code == 200


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
def test_score(server: LiveServer, reference: Reference, as_ids: bool, item_first: bool) -> None:
    query, items, labels = "The capital of", [" France is", " Paris"], [5, 300, 17]
    given: Any = (reference.ids(query), [reference.ids(item) for item in items]) if as_ids else (query, items)
    fields = {"query": given[0], "items": given[1], "label_token_ids": labels, "item_first": item_first}
    plain = post(server, "/v1/score", **fields).json()
    softmax = post(server, "/v1/score", **fields, apply_softmax=True).json()
    assert plain["object"] == "scoring"
    for item, row, among in zip(items, plain["scores"], softmax["scores"], strict=True):
        parts = (item, query) if item_first else (query, item)
        ids = [i for part in parts for i in reference.ids(part)] if as_ids else reference.ids("".join(parts))
        expected = reference.next_token(ids)[labels]
        np.testing.assert_allclose(row, expected, rtol=1e-3)
        np.testing.assert_allclose(among, expected / expected.sum(), rtol=1e-3)
        assert sum(among) == pytest.approx(1)


def test_score_of_one_item(server: LiveServer) -> None:
    (row,) = post(server, "/v1/score", query="a", items="b", label_token_ids=[1, 2]).json()["scores"]
    assert len(row) == 2


def test_rerank_by_embeddings(embedder: LiveServer, reference: Reference) -> None:
    query = "Which is the capital of France?"
    ranked = post(embedder, "/v1/rerank", query=query, documents=TEXTS).json()
    vector = reference.embedding(reference.ids(query))
    expected = {i: float(vector @ reference.embedding(reference.ids(text))) for i, text in enumerate(TEXTS)}
    assert [entry["index"] for entry in ranked] == sorted(expected, key=lambda i: -expected[i])
    for entry in ranked:
        assert entry["score"] == pytest.approx(expected[entry["index"]], abs=1e-5)
        assert entry["document"] == TEXTS[entry["index"]] and entry["meta_info"]["prompt_tokens"] > 0


def test_results_of_ranking_in_the_form_of_jina_and_cohere(embedder: LiveServer) -> None:
    documents: Any = ["Paris is the capital of France.", {"text": "Bread is baked."}, {"text": "It rains.", "id": 7}]
    body = {"model": "m", "query": "Which is the capital of France?", "documents": documents, "top_n": 2}
    ranked = post(embedder, "/v1/rerank", **body).json()
    for path in ("/rerank", "/v2/rerank"):
        answer = post(embedder, path, **body).json()
        assert (answer["model"], len(answer["results"])) == ("m", 2) and answer["usage"]["total_tokens"] > 0
        assert [result["index"] for result in answer["results"]] == [entry["index"] for entry in ranked]
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == pytest.approx([entry["score"] for entry in ranked], abs=1e-5)
        assert [result["document"]["text"] for result in answer["results"]] == [entry["document"] for entry in ranked]
    bare = post(embedder, "/rerank", **body, return_documents=False).json()
    assert all(result.keys() == {"index", "relevance_score"} for result in bare["results"])
    assert post(embedder, "/rerank", query="a", documents=[{"title": "x"}]).status_code == 400


MISTAKES = [
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ""}, "empty"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "empty"),
    ("/v1/embeddings", {"input": [-1]}, "token ids"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "at most 2048"),
    ("/v1/embeddings", {"input": "a " * 9000}, "context length"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 100000}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "pooling_type": "mean"}, "pooling_type"),
    ("/encode", {"text": "a", "input_ids": [1]}, "text or input_ids"),
    ("/v1/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
    ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
    ("/v1/score", {"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
    ("/v1/score", {"query": "a", "items": "b", "label_token_ids": [10**6]}, "token ids"),
    ("/v1/score", {"query": "a" * 40_000, "items": ["b"] * 2048, "label_token_ids": [1]}, "several calls"),
    ("/v1/score", {"query": [1] * 40_000, "items": [[2]] * 2048, "label_token_ids": [1]}, "several calls"),
    ("/v1/rerank", {"query": "a" * 40_000, "documents": ["b"] * 2048}, "several calls"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "yes and no"),
    ("/v1/classify", {"input": "a"}, "no classification head"),
    ("/v1/score", {"query": "a", "items": "b"}, "label_token_ids is missing"),
    ("/classify", {"input": "a", "text": "a"}, "one of input, text and input_ids"),
]


@pytest.mark.parametrize(("path", "body", "message"), MISTAKES)
def test_mistakes(server: LiveServer, path: str, body: dict[str, Any], message: str) -> None:
    reply = post(server, path, **body)
    assert reply.status_code == 400 and message in reply.text


ABORTED = [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS[0], "dimensions": 8}),
    ("/encode", {"text": TEXTS[0]}),
    ("/api/embed", {"model": "any", "input": TEXTS}),
    ("/v1/rerank", {"query": TEXTS[2], "documents": TEXTS[:2]}),
    ("/v1/score", {"query": TEXTS[2], "items": [" Paris", " Rome"], "label_token_ids": [1]}),
]


@pytest.mark.parametrize(("path", "body"), ABORTED)
def test_what_was_aborted_is_an_error(
    server: LiveServer, embedder: LiveServer, path: str, body: dict[str, Any]
) -> None:
    """Neither an empty vector nor a failure of the server. The engine pauses, so that nothing ends by itself."""
    asked = server if path == "/v1/score" else embedder
    assert post(asked, "/pause_generation", mode="in_place").status_code == 200
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(post, asked, path, **body)
        while httpx.get(f"{asked.url}/server_info").json()["internal_states"][0]["num_unfinished_reqs"] == 0:
            time.sleep(0.01)
        assert post(asked, "/abort_request", abort_all=True).status_code == 200
        answer = reply.result()
    assert post(asked, "/continue_generation").status_code == 200
    assert answer.status_code == 503 and "aborted" in answer.text
