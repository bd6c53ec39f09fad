"""Answers with many vectors: sent in pieces of a bounded size, and together the JSON that they would be at once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from sglang.srt.entrypoints.embeddings import serving_embeddings
from sglang.srt.entrypoints.embeddings.protocol import EmbeddingRequest, EncodeBody
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.native_hidden_states import response_with_hidden_states

VECTORS = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
MIB = 1 << 20


def sent(response: Response) -> tuple[Any, list[bytes]]:
    """Returns the answer, and the pieces in which it is sent."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    asyncio.run(response({"type": "http"}, receive, send))
    head, *bodies = messages
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    body = b"".join(body["body"] for body in bodies)
    headers = dict(head["headers"])
    assert headers[b"content-length"] == str(len(body)).encode() and headers[b"content-type"] == b"application/json"
    return json.loads(body), [body["body"] for body in bodies]


def answer(monkeypatch: pytest.MonkeyPatch, ask: Any, body: Any) -> tuple[Any, list[bytes]]:
    outputs = [
        SimpleNamespace(index=i, hidden=vector.tobytes(), meta=SimpleNamespace(prompt_tokens=3), finish=None)
        for i, vector in enumerate(VECTORS)
    ]
    stream = SimpleNamespace(is_batch=True, requests=[SimpleNamespace(rid=f"r{i}") for i in range(len(outputs))])

    async def collect(*_: object) -> Any:
        return stream, outputs

    monkeypatch.setattr(serving_embeddings, "collect_complete", collect)
    monkeypatch.setattr(serving_embeddings, "request_info", lambda rid, *_: {"id": rid})
    service: Any = SimpleNamespace(model_name="m")
    return sent(asyncio.run(ask(service, body, None)))


@pytest.mark.parametrize("route", ["/v1/embeddings", "/encode"])
def test_no_piece_has_all_vectors(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if route == "/encode":
        results, pieces = answer(monkeypatch, serving_embeddings.encode, EncodeBody(text=["a"] * len(VECTORS)))
        assert [result["meta_info"]["id"] for result in results] == [f"r{i}" for i in range(len(VECTORS))]
    else:
        whole, pieces = answer(monkeypatch, serving_embeddings.embeddings, EmbeddingRequest(input=["a"] * len(VECTORS)))
        results = whole["data"]
        assert [result["index"] for result in results] == list(range(len(VECTORS))) and whole["model"] == "m"
    for result, vector in zip(results, VECTORS, strict=True):
        np.testing.assert_allclose(result["embedding"], vector / np.linalg.norm(vector), rtol=1e-5)
    assert sum(map(len, pieces)) > 4 * MIB and max(map(len, pieces)) < 1.5 * MIB


def test_hidden_states_of_an_answer_are_sent_in_pieces() -> None:
    states = [VECTORS[:40], VECTORS[40], VECTORS[41]]

    async def work() -> list[dict[str, Any]]:
        return [{"text": "\0", "meta_info": {"hidden_states": states}}, {"text": "b", "meta_info": {}}]

    (first, second), pieces = sent(asyncio.run(response_with_hidden_states(work())))
    assert first["text"] == "\0" and second == {"text": "b", "meta_info": {}}
    for found, expected in zip(first["meta_info"]["hidden_states"], states, strict=True):
        np.testing.assert_array_equal(np.array(found, np.float32), expected)
    assert max(map(len, pieces)) < 2.5 * MIB < sum(map(len, pieces))


def test_an_answer_without_long_parts() -> None:
    assert sent(LongJSON().response({"a": [1]})) == ({"a": [1]}, [b'{"a":[1]}', b""])
