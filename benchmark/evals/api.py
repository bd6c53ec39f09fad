"""A client of OpenAI's API for evaluations: many requests at a time, whole answers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from record import Record


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is the response, None if there was none that can be used; `error` says why."""

    body: dict[str, Any] | None
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        usage = (self.body or {}).get("usage") or {}
        return int(usage.get("completion_tokens") or 0)


class ServerUnreachable(Exception):
    pass


def base_url(host: str, port: int) -> str:
    """`host` may be a name or, as in guides for SGLang, a URL without a port."""
    return f"{host if '://' in host else 'http://' + host}:{port}"


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            models = (await response.json())["data"]
    except (aiohttp.ClientError, asyncio.TimeoutError, KeyError, ValueError) as error:
        raise ServerUnreachable(
            f"{url}/v1/models gives no list of models ({type(error).__name__}: {error}). Is the server up, and is the "
            "port right?"
        ) from error
    return str(models[0]["id"])


async def ask(
    url: str,
    requests: Sequence[Request],
    parallel: int,
    api_key: str | None = None,
    timeout_s: float = 3600.0,
    record: Record | None = None,
) -> tuple[list[Answer], float]:
    """The answers in order, and the seconds from the first request to the last answer. With a `record`, what it has is
    not asked again, and the seconds are those of all runs. Raises ServerUnreachable."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=parallel)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model = await first_model(session, url)
        slots = asyncio.Semaphore(parallel)

        async def one(request: Request) -> Answer:
            body = {"model": model, **request.body}
            key = Record.key(request.path, body)
            known = record.get(key) if record is not None else None
            if known is not None:
                return Answer(known)
            async with slots:
                answer = await _post(session, url + request.path, body)
            if record is not None and answer.body is not None:
                record.add(key, answer.body)
            return answer

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(request) for request in requests))
        return list(answers), time.perf_counter() - started if record is None else record.seconds


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                return Answer(None, f"HTTP {response.status}: {(await response.text())[:300]}")
            content = await response.json()
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        return Answer(None, f"{type(error).__name__}: {error}")
    if not isinstance(content, dict) or not content.get("choices"):
        return Answer(None, "the response has no choices")
    return Answer(content)


def run(
    url: str, requests: Sequence[Request], parallel: int, api_key: str | None, record: Path | None = None
) -> tuple[list[Answer], float]:
    """`ask` for scripts: ends the program with a message if nobody answers. Raises ValueError for a file that is no
    record of answers."""
    kept = None if record is None else Record(record)
    try:
        return asyncio.run(ask(url, requests, parallel, api_key, record=kept))
    except ServerUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    finally:
        if kept is not None:
            kept.close()
