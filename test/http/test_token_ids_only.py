"""`--skip-tokenizer-init`: token ids go in and come out; forms whose answers are text refuse by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

MESSAGES = [{"role": "user", "content": "a"}]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": [1, 2], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": [1, 2], "max_tokens": 2, "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "a"}),
    ("/api/chat", {"model": "any", "messages": MESSAGES}),
    ("/tokenize", {"prompt": "a"}),
    ("/generate", {"text": "a"}),
    ("/generate", {"input_ids": [1], "sampling_params": {"stop": "a"}}),
]


@pytest.fixture(scope="module")
def ids_only() -> Iterator[LiveServer]:
    with live_server("--skip-tokenizer-init") as running:
        yield running


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_text_is_refused(ids_only: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = httpx.post(ids_only.url + path, json=body, timeout=300)
    assert reply.status_code == 400 and "--skip-tokenizer-init" in reply.text


def test_ids_are_served(ids_only: LiveServer, http: httpx.Client) -> None:
    body = {"input_ids": [[5, 6, 7], [9]], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    results = httpx.post(f"{ids_only.url}/generate", json=body, timeout=300).json()
    assert [result["output_ids"] for result in results] == [
        result["output_ids"] for result in http.post("/generate", json=body).json()
    ]
    assert all("text" not in result for result in results)
    embedded = httpx.post(f"{ids_only.url}/v1/embeddings", json={"input": [5, 6, 7]}, timeout=300).json()
    assert len(embedded["data"][0]["embedding"]) == 256
