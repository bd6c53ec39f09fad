"""The server that the hostile tests share, and what they ask of it after each attack."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Callable

import httpx
from fuzz.guarded_server import Damage, GuardedServer
from fuzz.hostile_bodies import SESSIONS
from fuzz.soak_jobs import reference_jobs, run_jobs, with_answers

CONTEXT, TOKENS = 256, 2048
POOL = ("--context-length", str(CONTEXT), "--max-total-tokens", str(TOKENS))
FLAGS = (*POOL, "--enable-metrics", "--enable-streaming-session")
SHORT = ("--preferred-sampling-params", '{"max_new_tokens": 4}')
"""So that a random request that does not say how long its answer may be is not one of 256 tokens."""


class Target:
    """The server under attack. One that was damaged is replaced, so that no test fails for the sake of another."""

    def __init__(self) -> None:
        self._server: GuardedServer | None = None
        self.seen: list[str] = []
        """What is told of each server at the end."""

    def server(self) -> GuardedServer:
        if self._server is None:
            server = GuardedServer(*FLAGS, *SHORT)
            server.start(warm_up)
            self._server = server
        return self._server

    def check_health(self) -> None:
        """Raises Damage, and gives the server up then."""
        self._check(GuardedServer.check_health)

    def check(self) -> None:
        """As `check_health`; and ordinary requests are served, and what others had is given back."""
        self._check(GuardedServer.check_health)
        self._check(lambda server: probe(server.url))
        self._check(GuardedServer.check_rest)

    def _check(self, check: Callable[[GuardedServer], None]) -> None:
        try:
            check(self.server())
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self._server is not None:
            self.seen += [str(self._server.figures), *self._server.silences]
            self._server.end()
            self._server = None


def warm_up(url: str) -> None:
    """What an ordinary day brings: each kind of request, several at once, a large text and a large schema."""
    references = with_answers(url, reference_jobs()[:4])
    asyncio.run(run_jobs(url, references * 6))
    for path in ("/openapi.json", "/metrics", "/v1/models", "/"):
        assert httpx.get(url + path).status_code == 200
    schema = {"type": "object", "properties": {f"name{i}": {"type": ["string", "number"]} for i in range(500)}}
    params = {"max_new_tokens": 2, "json_schema": json.dumps(schema)}
    answer = httpx.post(f"{url}/generate", json={"text": "a", "sampling_params": params}, timeout=300)
    assert answer.status_code == 200, answer.text
    httpx.post(f"{url}/tokenize", json={"prompt": "a b c " * 300_000}, timeout=300)  # served or refused, but read
    fill_word_cache(url)
    fill_pool(url)
    open_sessions(url)
    probe(url)


def fill_word_cache(url: str) -> None:
    """The tokenizer keeps the tokens of up to 10,000 pieces of text, whoever sends them."""
    draw = random.Random(0)
    for _ in range(20):
        text = "".join(draw.choices(string.printable + "äöüßéñçłø漢字かな한국😀", k=20_000))
        assert httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=300).status_code == 200


def fill_pool(url: str) -> None:
    """Its memory is the server's from the first use on."""
    prompts = [[first] * (CONTEXT - 2) for first in range(5, 5 + TOKENS // (CONTEXT - 2))]
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{url}/generate", json=body, timeout=300).status_code == 200


def open_sessions(url: str) -> None:
    """Anew, without what was said in them."""
    for session, fields in SESSIONS.items():
        httpx.post(f"{url}/close_session", json={"session_id": session})
        opened = {"capacity_of_str_len": 1 << 40, "session_id": session, **fields}
        assert httpx.post(f"{url}/open_session", json=opened).status_code == 200


def probe(url: str) -> None:
    """An ordinary request and a structured one are served."""
    rid = {"rid": "probe"}
    for params in ({"max_new_tokens": 2}, {"max_new_tokens": 8, "regex": "[0-9]{3}"}):
        answer = httpx.post(f"{url}/generate", json={"text": "a", "sampling_params": params, **rid}, timeout=300)
        if answer.status_code != 200:
            raise Damage(f"an ordinary request gets {answer.status_code}: {answer.text}")
