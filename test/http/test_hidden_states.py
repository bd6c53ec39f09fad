"""`return_hidden_states` of `/generate` over HTTP, from a pipeline of two stages, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from live_server import LiveServer, live_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.embedded import DEFAULT_MODEL_PATH

PROMPT = "The capital of France is"
OTHER = "Sort 3, 1, 2, and say which of these numbers is the largest one.\n" * 3
PARAMS = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def returning() -> Iterator[LiveServer]:
    with live_server("--enable-return-hidden-states", "--chunked-prefill-size", "16", "--pp-size", "2") as running:
        yield running


def generate(server: LiveServer, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/generate", json={"sampling_params": PARAMS, **body}, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check(prompt: str, result: Any) -> None:
    """One entry for the prompt, and one of each output token but the last."""
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)(prompt)["input_ids"]
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids + result["output_ids"][:-1]])).last_hidden_state[0].numpy()
    states = result["meta_info"]["hidden_states"]
    assert len(states) == len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
    np.testing.assert_allclose(states[0], expected[: len(ids)], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(states[1:], expected[len(ids) :], atol=1e-4, rtol=1e-4)


def test_whole_answers(returning: LiveServer) -> None:
    """The second time the prompts are cached; of a batch those have them that want them."""
    for _ in range(2):
        check(PROMPT, generate(returning, text=PROMPT, return_hidden_states=True))
        first, second = generate(returning, text=[PROMPT, OTHER], return_hidden_states=[False, True])
        assert "hidden_states" not in first["meta_info"]
        check(OTHER, second)


def test_streams_end_with_them(returning: LiveServer) -> None:
    body = {"text": OTHER, "sampling_params": PARAMS, "stream": True, "return_hidden_states": True}
    with httpx.stream("POST", f"{returning.url}/generate", json=body, timeout=300) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and not any("hidden_states" in event["meta_info"] for event in events[:-1])
    check(OTHER, events[-1])


def test_sessions_have_them(returning: LiveServer) -> None:
    session = httpx.post(f"{returning.url}/open_session", json={"capacity_of_str_len": 1000}).json()
    turn = {"session_params": {"id": session}, "return_hidden_states": True}
    check(PROMPT, generate(returning, text=PROMPT, **turn))


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_are_refused_before_anything_runs(returning: LiveServer, stream: bool) -> None:
    body = {"text": [PROMPT] * 4000, "sampling_params": {"max_new_tokens": 400}, "return_hidden_states": True}
    reply = httpx.post(f"{returning.url}/generate", json={**body, "stream": stream}, timeout=300)
    assert reply.status_code == 400 and "hidden states" in reply.text and "ask for fewer" in reply.text


def test_the_flag_is_named_where_it_is_missing(server: LiveServer) -> None:
    reply = httpx.post(f"{server.url}/generate", json={"text": PROMPT, "return_hidden_states": True}, timeout=300)
    assert reply.status_code == 400 and "--enable-return-hidden-states" in reply.text
    reply = httpx.post(f"{server.url}/generate", json={"text": PROMPT, "return_hidden_states": "yes"}, timeout=300)
    assert reply.status_code == 400
