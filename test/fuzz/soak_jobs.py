"""Clients of every kind: what each sends, how it behaves, and what it must get."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

WORDS = "the quick brown fox jumps over the lazy dog while seven wizards boil 12 eggs in Köln 🙂".split()
SHARED = " ".join(WORDS * 4)
NUM_GRAMMARS = 40
CONCURRENCY = 32
PATIENCE_S = 1.0
"""Longest time after which a client gives up whose answer comes in one piece."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Job:
    """One client."""

    path: str
    body: dict[str, Any]
    behaviour: str = "stay"
    """stay, leave (close the connection early) or abort (by rid)."""
    patience: float = 0.0
    """In [0, 1): how far the client lets it come before it leaves or aborts."""
    answer: str | None = None
    """What the greedy answer must be, whoever else is served."""


def grammar(number: int) -> dict[str, Any]:
    """Sampling parameters of /generate."""
    schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}, "required": [f"a{number}"]}
    kinds: list[dict[str, Any]] = [
        {"json_schema": json.dumps({**schema, "additionalProperties": False})},
        {"regex": f"[a-c]{{2,{number + 3}}}"},
        {"ebnf": f'root ::= "yes {number}" | "no" [0-9]*'},
    ]
    return kinds[number % len(kinds)]


def openai_grammar(number: int) -> dict[str, Any]:
    given = grammar(number)
    if "json_schema" in given:
        schema = json.loads(given["json_schema"])
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    return given


# --- what clients ask -------------------------------------------------------------------------------------------------


def reference_jobs() -> list[Job]:
    """Greedy requests whose answers must not depend on who else is served."""
    jobs = []
    for number in range(12):
        text = " ".join(WORDS[number % 5 :: 1 + number % 3])
        if number % 2:
            text = f"{SHARED} {text}"
        greedy = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
        constrained = {"max_new_tokens": 24, "temperature": 0, **grammar(number)} if number % 4 == 3 else greedy
        jobs.append(Job("/generate", {"text": text, "sampling_params": constrained, "stream": False}))
        chat = {
            "messages": [{"role": "user", "content": f"What is {number}+{number * 3}?"}],
            "stream": bool(number % 2),
        }
        jobs.append(Job("/v1/chat/completions", {**chat, "max_tokens": 24, "temperature": 0}))
    return jobs


def make_job(name: str, rng: random.Random, references: Sequence[Job]) -> Job:
    behaviour = rng.choices(["stay", "leave", "abort"], [6, 2, 1])[0]
    if behaviour == "stay" and rng.random() < 0.4:
        return rng.choice(references)
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    if rng.random() < 0.4:
        prompt = f"{SHARED} {prompt}"
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/generate"])
    make_body = generate_body if path == "/generate" else openai_body
    body = make_body(name, prompt, rng)
    if path == "/v1/completions":
        body["prompt"] = prompt
        body |= {"logprobs": 2, "echo": True} if rng.random() < 0.2 else {}
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": prompt}]
        body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.2 else {}
    return Job(path, {**body, "stream": rng.random() < 0.6}, behaviour, rng.random())


def generate_body(rid: str, prompt: str, rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": rng.choice([1, 8, 30, 80]), "temperature": rng.choice([0, 1])}
    if rng.random() < 0.2:
        params |= grammar(rng.randrange(NUM_GRAMMARS))
    else:
        params["ignore_eos"] = rng.random() < 0.5
    body = {"text": prompt, "sampling_params": params, "return_logprob": rng.random() < 0.3, "rid": rid}
    if rng.random() < 0.2:
        body |= {"text": [prompt, prompt[::-1], "x"], "rid": [f"{rid}-{i}" for i in range(3)]}
    return body


def openai_body(rid: str, prompt: str, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 30, 80]), "temperature": rng.choice([0, 0.7]), "rid": rid}
    body |= {"n": rng.choice([1, 1, 1, 3]), "seed": rng.choice([None, rng.randrange(1000)])}
    if rng.random() < 0.15:
        body |= openai_grammar(rng.randrange(NUM_GRAMMARS))
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("aeinrst"), "never there"]
    if rng.random() < 0.1:
        body["stop_regex"] = r"[0-9]{2,4}"
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {"17": 2.0}}
    return body


# --- what they do -----------------------------------------------------------------------------------------------------


async def run_jobs(url: str, jobs: Sequence[Job]) -> list[str]:
    """How each ended: ok, left or aborted."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    places = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def run(job: Job) -> str:
            async with places:
                return await (exchange_events if job.body["stream"] else exchange_whole)(client, job)

        return await asyncio.gather(*map(run, jobs))


async def abort(client: httpx.AsyncClient, job: Job) -> None:
    rids = job.body["rid"]
    for rid in rids if isinstance(rids, list) else [rids]:
        assert (await client.post("/abort_request", json={"rid": rid})).status_code == 200


async def exchange_whole(client: httpx.AsyncClient, job: Job) -> str:
    exchange = asyncio.ensure_future(client.post(job.path, json=job.body))
    if job.behaviour != "stay":
        await asyncio.wait({exchange}, timeout=job.patience * PATIENCE_S)
        if job.behaviour == "leave":
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
            return "left"
        await abort(client, job)
    response = await exchange
    assert response.status_code == 200, f"{job}: {response.status_code} {response.text[:500]}"
    answer = response.json()
    if job.path == "/generate":
        results = answer if isinstance(answer, list) else [answer]
        texts = [result["text"] for result in results]
        reasons = [result["meta_info"]["finish_reason"]["type"] for result in results]
    else:
        texts = [choice.get("text") or choice.get("message", {}).get("content") for choice in answer["choices"]]
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
    return ended(job, texts, reasons)


async def exchange_events(client: httpx.AsyncClient, job: Job) -> str:
    """Leaves or aborts after a part of the events that there might be."""
    body = job.body
    limit = body["max_tokens"] if "max_tokens" in body else body["sampling_params"]["max_new_tokens"]
    last_event = int(job.patience * limit)
    events: list[Any] = []
    async with client.stream("POST", job.path, json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{job}: {response.status_code} {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if job.behaviour != "stay" and len(events) == last_event:
                if job.behaviour == "leave":
                    return "left"
                await abort(client, job)
            if line and not line.startswith(":"):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    assert events.pop() == "[DONE]", f"{job}: {events[-3:]}"
    if any("error" in event for event in events):
        assert job.behaviour == "abort" and "aborted" in events[-1]["error"]["message"], f"{job}: {events[-1]}"
        return "aborted"
    return ended(job, *joined(job, events))


def joined(job: Job, events: list[Any]) -> tuple[list[str], list[str]]:
    if job.path == "/generate":
        metas = [event["meta_info"]["finish_reason"] for event in events]
        return [events[-1]["text"]], [reason["type"] for reason in metas if reason is not None]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return ["".join(pieces)], [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def ended(job: Job, texts: list[str], reasons: list[str]) -> str:
    prompts = job.body.get("text")
    assert len(reasons) == (len(prompts) if isinstance(prompts, list) else job.body.get("n", 1)), f"{job}: {reasons}"
    if "abort" in reasons:
        assert job.behaviour == "abort", job
        return "aborted"
    assert set(reasons) <= {"stop", "length"}
    if job.answer is not None:
        assert texts == [job.answer], f"{job}: {texts}"
    return "ok"


# --- alone ------------------------------------------------------------------------------------------------------------


def with_answers(url: str, jobs: Sequence[Job]) -> list[Job]:
    """The reference jobs with the answers that they get when nobody else is served."""

    async def answer(job: Job) -> Job:
        whole = Job(job.path, {**job.body, "stream": False})
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            given = (await client.post(whole.path, json=whole.body)).raise_for_status().json()
        text = given["text"] if job.path == "/generate" else given["choices"][0]["message"]["content"]
        return Job(job.path, job.body, answer=text)

    return [asyncio.run(answer(job)) for job in jobs]
