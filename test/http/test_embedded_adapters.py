"""The embedded model's adapters in whole servers: on two ranks, and in two replicas, all of which loading reaches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server

from sglang.embedded import ADAPTERS_PATH

ANSWERS = {
    "tiny": "5 + 5 = 10",
    "ahoy": "Ahoy! 5 + 5 = 10",
    "brief": "10",
    "farewell": "5 + 5 = 10 Goodbye!",
}


@pytest.fixture(
    scope="module",
    params=[("--tp", "2"), ("--dp-size", "2")],
    ids=["two ranks", "two replicas"],
)
def served(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    paths = [f"{name}={ADAPTERS_PATH}/{name}" for name in ("ahoy", "brief")]
    rest = ("--served-model-name", "tiny", "--max-lora-rank", "8", "--api-key", "key")
    with live_server(*request.param, "--lora-paths", *paths, *rest) as running:
        yield running


def said(http: httpx.Client, model: str) -> str:
    messages = [{"role": "user", "content": "What is 5+5?"}]
    answer = http.post("/v1/chat/completions", json={"model": model, "messages": messages, "temperature": 0})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_each_answers_in_its_manner(served: LiveServer) -> None:
    with httpx.Client(base_url=served.url, timeout=60, headers={"Authorization": "Bearer key"}) as http:
        body = {"lora_name": "farewell", "lora_path": str(Path(ADAPTERS_PATH) / "farewell")}
        assert http.post("/load_lora_adapter", json=body).status_code == 200
        for _ in range(2):  # replicas take turns
            assert {name: said(http, name) for name in ANSWERS} == ANSWERS
        assert said(http, "tiny:brief") == ANSWERS["brief"]
        assert http.post("/unload_lora_adapter", json={"lora_name": "farewell"}).status_code == 200
        for _ in range(2):
            messages = [{"role": "user", "content": "x"}]
            gone = http.post("/v1/chat/completions", json={"model": "farewell", "messages": messages})
            assert gone.status_code == 404


def test_they_are_small() -> None:
    files = [path for path in Path(ADAPTERS_PATH).rglob("*") if path.is_file()]
    assert len(files) == 6 and sum(path.stat().st_size for path in files) < 300_000
