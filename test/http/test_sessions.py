"""Sessions of `/generate`: what was said before is named instead of sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def session(http: httpx.Client) -> Any:
    session_id = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    yield session_id
    http.post("/close_session", json={"session_id": session_id})


def generate(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/generate", json={"sampling_params": GREEDY, **body})
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def ids(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return tokens


def test_a_sequence_goes_on(http: httpx.Client, session: str) -> None:
    first = generate(http, text="The capital of", session_params={"id": session})
    second = generate(http, text=" and", session_params={"id": session, "rid": first["meta_info"]["id"]})
    prompt = http.post("/tokenize", json={"prompt": "The capital of"}).json()["tokens"]
    whole = generate(http, input_ids=[*prompt, *first["output_ids"], *ids(http, " and")])
    assert second["output_ids"] == whole["output_ids"] and second["text"] == whole["text"]
    assert second["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    assert second["meta_info"]["cached_tokens"] > 0


def test_branches(http: httpx.Client, session: str) -> None:
    """Two go on from one request; a third from its prompt, a fourth from its first tokens."""
    first = generate(http, input_ids=[5, 6, 7], rid="first", session_params={"id": session})
    said = [5, 6, 7, *first["output_ids"]]
    for fields, prompt in (
        ({}, [*said, 9]),
        ({}, [*said, 9]),
        ({"drop_previous_output": True}, [5, 6, 7, 9]),
        ({"offset": 2}, [5, 6, 9]),
        ({"offset": -1}, [*said[:-1], 9]),
    ):
        result = generate(http, input_ids=[9], session_params={"id": session, "rid": "first", **fields})
        assert result["output_ids"] == generate(http, input_ids=prompt)["output_ids"]
        assert result["meta_info"]["prompt_tokens"] == len(prompt)


def test_replace(http: httpx.Client, session: str) -> None:
    for rid, fields in (("a", {}), ("b", {"rid": "a"}), ("c", {"rid": "b"})):
        generate(http, input_ids=[5], rid=rid, session_params={"id": session, **fields})
    generate(http, input_ids=[5], rid="d", session_params={"id": session, "rid": "a", "replace": True})
    for rid, status in (("b", 400), ("c", 400), ("d", 200), ("a", 200)):
        body = {"input_ids": [5], "sampling_params": GREEDY, "session_params": {"id": session, "rid": rid}}
        assert http.post("/generate", json=body).status_code == status, rid
    generate(http, input_ids=[5], rid="e", session_params={"id": session, "replace": True})
    body = {"input_ids": [5], "session_params": {"id": session, "rid": "a"}}
    assert http.post("/generate", json=body).status_code == 400


def test_stream(http: httpx.Client, session: str) -> None:
    body = {"text": "The capital of", "rid": "s", "stream": True, "sampling_params": GREEDY}
    with http.stream("POST", "/generate", json={**body, "session_params": {"id": session}}) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    last = json.loads(events[-2])
    second = generate(http, text=" and", session_params={"id": session, "rid": "s"})
    assert second["meta_info"]["prompt_tokens"] == last["meta_info"]["prompt_tokens"] + 6 + len(ids(http, " and"))


def test_a_reader_that_leaves_takes_its_request_along(http: httpx.Client, session: str) -> None:
    params = {**GREEDY, "max_new_tokens": 900}
    body = {"input_ids": [5], "rid": "left", "stream": True, "sampling_params": params}
    body["session_params"] = {"id": session}
    with http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    for _ in range(600):  # until the server has seen it
        reply = http.post("/generate", json={"input_ids": [5], "session_params": {"id": session, "rid": "left"}})
        if "has no request" in reply.text:
            break
    assert reply.status_code == 400 and "has no request" in reply.text


def test_names(http: httpx.Client) -> None:
    opened = http.post("/open_session", json={"capacity_of_str_len": 4, "session_id": "mine"})
    assert opened.json() == "mine"
    again = http.post("/open_session", json={"capacity_of_str_len": 4, "session_id": "mine"})
    assert again.status_code == 400 and "already" in again.text
    too_long = http.post("/generate", json={"input_ids": [5] * 5, "session_params": {"id": "mine"}})
    assert too_long.status_code == 400 and "capacity" in too_long.text
    assert http.post("/close_session", json={"session_id": "mine"}).status_code == 200
    assert http.post("/close_session", json={"session_id": "mine"}).status_code == 400
    gone = http.post("/generate", json={"input_ids": [5], "session_params": {"id": "mine"}})
    assert gone.status_code == 400 and "no session" in gone.text


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [[5], [6]]},
        {"text": ["a", "b"]},
        {"text": "a", "input_ids": [5]},
        {"input_ids": [-1]},
        {"input_ids": [10**12]},
        {"input_ids": []},
        {"text": "a", "sampling_params": {"n": 2, "top_p": 0}},
        {"input_ids": [5], "sampling_params": {"n": 2, "max_new_tokens": 2}},
        {"input_ids": [5], "sampling_params": {"n": 2, "max_new_tokens": 2}, "stream": True},
    ],
)
def test_mistakes(http: httpx.Client, session: str, body: dict[str, Any]) -> None:
    reply = http.post("/generate", json={**body, "rid": "wrong", "session_params": {"id": session}})
    assert reply.status_code == 400, reply.text
    after = http.post("/generate", json={"input_ids": [5], "session_params": {"id": session, "rid": "wrong"}})
    assert "has no request" in after.text


@pytest.mark.parametrize("body", [{"input_ids": [1, [2]]}, {"input_ids": [-1]}, {"text": "a " * 50_000}])
def test_prompts_are_checked_as_those_of_other_requests(http: httpx.Client, session: str, body: dict[str, Any]) -> None:
    generate(http, input_ids=[5], rid="first", session_params={"id": session})
    alone = http.post("/generate", json=body)
    for rid in (None, "first"):
        reply = http.post("/generate", json={**body, "session_params": {"id": session, "rid": rid}})
        assert (reply.status_code, reply.json()) == (400, alone.json())
