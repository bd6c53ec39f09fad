"""Work for a client that has left is ended, on every route that answers with work of threads or processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from sglang.srt.entrypoints.anthropic import serving_messages
from sglang.srt.entrypoints.embeddings import serving_scores
from sglang.srt.entrypoints.http_stream import ClientDisconnected
from sglang.srt.entrypoints.openai import routes


class Left:
    """Work that never ends by itself, and a client that leaves once it has begun."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), False

    async def work(self, *_: Any) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    async def receive(self) -> dict[str, Any]:
        await self.begun.wait()
        return {"type": "http.disconnect"}


def leaves(answer: Any, left: Left) -> None:
    async def run() -> None:
        scope = {"type": "http", "path": "/", "method": "POST", "headers": []}
        await asyncio.wait_for(answer(Request(scope, left.receive)), 30)

    with pytest.raises(ClientDisconnected):
        asyncio.run(run())
    assert left.ended


@pytest.mark.parametrize(
    ("route", "work"),
    [
        ("post_tokenize", "tokenize"),
        ("post_parse_function_call", "parse_calls"),
        ("post_separate_reasoning", "separate_reasoning"),
        ("post_detokenize", None),
    ],
)
def test_routes_of_tools(route: str, work: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left()

    async def body(*_: object) -> object:
        return SimpleNamespace(tokens=[1, 2], skip_special_tokens=True)

    config = SimpleNamespace(vocab_size=10)
    text = SimpleNamespace(in_thread=left.work)
    engine = SimpleNamespace(manager=SimpleNamespace(model_config=config, text=text), formats=None)
    monkeypatch.setattr(routes, "engine_of", lambda request: engine)
    monkeypatch.setattr(routes, "read_body", body)
    monkeypatch.setattr(routes, "body_bytes", lambda request: 2)
    if work is not None:
        monkeypatch.setattr(routes, work, left.work)
    leaves(getattr(routes, route), left)


def test_edits_before_the_second_count(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left()

    async def count(*_: object) -> int:
        return 5

    monkeypatch.setattr(serving_messages, "_count", count)
    monkeypatch.setattr(serving_messages, "_edit_messages", left.work)
    monkeypatch.setattr(serving_messages, "body_bytes", lambda request: 2)
    body: Any = SimpleNamespace(context_management={})
    leaves(lambda request: serving_messages.count_tokens(None, body, request), left)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [serving_scores.rerank, serving_scores.rerank_results])
def test_prompts_of_documents_to_rank(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Left()
    monkeypatch.setattr(serving_scores, "_ranking", left.work)
    leaves(lambda request: answer(None, None, request), left)
