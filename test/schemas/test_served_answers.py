"""Three hundred schemas of growing difficulty, each answered by the embedded model over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema_rs
import pytest
from live_server import live_server

from .generator import Schema, schemas

pytestmark = [pytest.mark.schemas, pytest.mark.timeout(3600)]

AT_ONCE = 16
TRIES = 4
"""Samples, until one ends by itself: a model that small may go on with what has no end."""


async def answer(client: httpx.AsyncClient, places: asyncio.Semaphore, schema: Schema) -> str:
    """`valid`, or what is wrong."""
    text = f"Answer with JSON for this schema: {json.dumps(schema, ensure_ascii=False)}"
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 800,
        "frequency_penalty": 1.5,  # or it fills the white space that is allowed between two elements
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    async with places:
        for seed in range(TRIES):
            response = await client.post("/v1/chat/completions", json={**body, "seed": seed})
            result = response.json()
            if response.status_code != 200:
                return f"{response.status_code}: {result}"
            choice = result["choices"][0]
            if choice["finish_reason"] == "stop":
                value = json.loads(choice["message"]["content"])
                return "valid" if jsonschema_rs.is_valid(schema, value) else f"invalid: {choice['message']['content']}"
    return "no end"


async def answers(url: str) -> dict[str, str]:
    places = asyncio.Semaphore(AT_ONCE)
    names, all_schemas = zip(*schemas(), strict=True)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        results = await asyncio.gather(*(answer(client, places, schema) for schema in all_schemas))
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_every_answer_is_valid(backend: str) -> None:
    flags = ("--served-model-name", "tiny", "--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*flags, "--grammar-backend", backend) as server:
        results = asyncio.run(answers(server.url))
    assert len(results) == 300
    assert {name: result for name, result in results.items() if result != "valid"} == {}
