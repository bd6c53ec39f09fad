"""200 concurrent requests of every kind, with clients that abort and leave: all end, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from live_server import live_server

CONTEXT = 512
POOL = 1024
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WORDS = "the quick brown fox jumps over the lazy dog while seven wizards boil 12 eggs in Köln 🙂".split()
SHARED = " ".join(WORDS * 4)


@dataclass(frozen=True)
class Job:
    """One client: what it sends, and how it behaves."""

    path: str
    body: dict[str, Any]
    behaviour: str
    """stay, leave (close the connection early) or abort (by rid)."""
    patience: float
    delay: float


def make_job(number: int, rng: random.Random) -> Job:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
    if rng.random() < 0.4:
        prompt = f"{SHARED} {prompt}"
    limit = rng.choice([1, 8, 30, 80])
    stream = rng.random() < 0.6
    rid = f"job-{number}"
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/generate"])
    if path == "/generate":
        params = {"max_new_tokens": limit, "temperature": rng.choice([0, 1]), "ignore_eos": rng.random() < 0.5}
        body = {"text": prompt, "sampling_params": params, "return_logprob": rng.random() < 0.3}
        if rng.random() < 0.2:
            body = {**body, "text": [prompt, prompt[::-1], "x"], "rid": [f"{rid}-{i}" for i in range(3)]}
        else:
            body["rid"] = rid
    else:
        body = {"max_tokens": limit, "temperature": rng.choice([0, 0.7]), "rid": rid, "n": rng.choice([1, 1, 1, 3])}
        body["seed"] = rng.choice([None, number])
        if path == "/v1/completions":
            body["prompt"] = prompt
            body |= {"logprobs": 2, "echo": True} if rng.random() < 0.2 else {}
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
            body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.2 else {}
        if rng.random() < 0.15:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        if rng.random() < 0.3:
            body["stop"] = [rng.choice("aeinrst"), "never there"]
    behaviour = rng.choices(["stay", "leave", "abort"], [0.6, 0.25, 0.15])[0]
    return Job(path, {**body, "stream": stream}, behaviour, rng.uniform(0.0, 2.0), rng.uniform(0.0, 1.0))


async def run_job(client: httpx.AsyncClient, job: Job) -> str:
    """How it ended: ok, refused, left or aborted."""
    await asyncio.sleep(job.delay)
    exchange = asyncio.ensure_future(exchange_with(client, job))
    if job.behaviour == "stay":
        return await exchange
    done, _ = await asyncio.wait({exchange}, timeout=job.patience)
    if done:
        return exchange.result()
    if job.behaviour == "abort":
        rids = job.body["rid"]
        for rid in rids if isinstance(rids, list) else [rids]:
            assert (await client.post("/abort_request", json={"rid": rid})).status_code == 200
        return await exchange
    exchange.cancel()
    await asyncio.gather(exchange, return_exceptions=True)
    return "left"


async def exchange_with(client: httpx.AsyncClient, job: Job) -> str:
    async with client.stream("POST", job.path, json=job.body) as response:
        text = (await response.aread()).decode()
    if response.status_code == 503:
        assert "queue" in text.lower()
        return "refused"
    assert response.status_code == 200, f"{job}: {response.status_code} {text[:500]}"
    if not job.body["stream"]:
        return check_whole(job, json.loads(text))
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]", f"{job}: {text[-500:]}"
    return check_events(job, [json.loads(event) for event in events[:-1]])


def num_sequences(job: Job) -> int:
    texts = job.body.get("text")
    return len(texts) if isinstance(texts, list) else job.body.get("n", 1)


def check_whole(job: Job, answer: Any) -> str:
    if job.path == "/generate":
        results = answer if isinstance(answer, list) else [answer]
        reasons = [result["meta_info"]["finish_reason"]["type"] for result in results]
    else:
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert len(reasons) == num_sequences(job)
    return ended(job, reasons)


def check_events(job: Job, events: list[Any]) -> str:
    if any("error" in event for event in events):  # the queue was full for a part of a batch
        assert "queue" in events[-1]["error"]["message"].lower()
        return "refused"
    if job.path == "/generate":
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        found = [reason["type"] for reason in reasons if reason is not None]
    else:
        choices = [choice for event in events for choice in event["choices"]]
        found = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(found) == num_sequences(job)
    return ended(job, found)


def ended(job: Job, reasons: list[str]) -> str:
    if "abort" in reasons:
        assert job.behaviour == "abort"
        return "aborted"
    assert set(reasons) <= {"stop", "length"}
    return "ok"


async def run_all(url: str, jobs: list[Job]) -> list[str]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(run_job(client, job) for job in jobs))


def internal_state(url: str) -> Any:
    return httpx.get(f"{url}/server_info", timeout=30).json()["internal_states"][0]


@pytest.mark.parametrize(("page_size", "num_requests"), [(1, 200), (16, 80)])
def test_load(page_size: int, num_requests: int) -> None:
    rng = random.Random(page_size)
    jobs = [make_job(number, rng) for number in range(num_requests)]
    flags = ["--context-length", CONTEXT, "--max-total-tokens", POOL, "--max-running-requests", 24]
    flags += ["--max-queued-requests", 3 * num_requests // 4, "--chunked-prefill-size", 64, "--page-size", page_size]
    flags += ["--schedule-conservativeness", 0.1]
    with live_server(*map(str, flags)) as server:
        slots = internal_state(server.url)["free_request_slots"]
        ends = asyncio.run(run_all(server.url, jobs))
        counts = {end: ends.count(end) for end in sorted(set(ends))}
        print(f"\npage size {page_size}: {counts}, retractions: {internal_state(server.url)['num_retracted_reqs']}")
        assert counts["ok"] > num_requests // 4 and counts["left"] > 0

        for _ in range(200):
            state = internal_state(server.url)
            if state["num_unfinished_reqs"] == 0:
                break
            httpx.get(f"{server.url}/health")
        memory = state["memory_usage"]
        assert state["num_unfinished_reqs"] == state["num_running_reqs"] == state["num_queue_reqs"] == 0
        assert memory["held"] == 0 and memory["free"] + memory["cached"] == memory["total"]
        assert state["free_request_slots"] == slots
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        memory = internal_state(server.url)["memory_usage"]
        assert memory["free"] == memory["total"]
        log = server.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]
