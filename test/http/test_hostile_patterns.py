"""Stop strings, patterns and grammars that are made to hurt: they get their answer, and the others get theirs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer, live_server

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
SMALL_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


def generate(http: httpx.Client, text: str = "Once", max_new_tokens: int = 8, **params: Any) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, **params}
    return http.post(GENERATE, json={"text": text, "sampling_params": params})


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


NO_TEXT = "No text satisfies the grammar"
CIRCULAR = f"{NO_TEXT} | Circular $ref chain"  # xgrammar before 0.2.9 | since


def memory_bytes(server: LiveServer) -> int:
    """Of all processes of the server but the one that compiles grammars, which may come and go."""
    size = 0
    for process in (front := psutil.Process(server.process.pid), *front.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            size += process.memory_info().rss * (not compiles(process))
    return size


def compiles(process: psutil.Process) -> bool:
    """Whether it is the process that compiles grammars, or a child of that."""
    with suppress(psutil.NoSuchProcess):
        return "compile_process" in " ".join(process.cmdline())
    return False


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_regex": "a{4294967294}"}, "elements when its repetitions are written out"),
        ({"stop_regex": "a{1000000}"}, "elements when its repetitions are written out"),
        ({"stop_regex": "a{99999999999999999999}"}, "the repetition number is too large"),
        ({"stop_regex": "(" * 400 + "a" + ")" * 400}, "may nest 32 groups, got 400"),
        ({"stop_regex": ["a" * 1500] * 2}, "at most 2048 characters in all"),
        ({"stop": "ab" * 20_000}, "at most 1024 characters, got 40000"),
        ({"json_schema": '{"$ref": "#"}'}, CIRCULAR),
        ({"json_schema": json.dumps(CYCLE)}, CIRCULAR),
        ({"json_schema": json.dumps({"$ref": "http://127.0.0.1:9/x.json"})}, "only references inside of the schema"),
        ({"json_schema": json.dumps({"$ref": "file:///etc/hostname"})}, "only references inside of the schema"),
        ({"json_schema": nested(2000)}, "nests 2001 objects and arrays"),
        ({"json_schema": json.dumps({"type": "string", "maxLength": 10**18})}, "maxLength must be at most 10000"),
        ({"ebnf": "root ::= root"}, NO_TEXT),
        ({"ebnf": 'root ::= "a" root'}, NO_TEXT),
        ({"regex": "a{99999999999999999999}"}, "must be at most 10000"),
        ({"regex": "x" * 300_000}, "at most 262144 characters"),
    ],
)
def test_refused_with_a_reason(http: httpx.Client, params: dict[str, Any], message: str) -> None:
    response = generate(http, **params)
    assert response.status_code == 400, response.text[:500]
    assert any(each in response.json()["error"]["message"] for each in message.split(" | ")), response.text[:500]


def test_the_openai_form_of_a_refusal(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": 4, "response_format": wanted, "stream": stream}
        response = http.post(COMPLETIONS, json=body)
        assert any(each in response.text for each in CIRCULAR.split(" | "))
        assert stream or response.status_code == 400


def test_a_stop_string_that_is_a_special_token(http: httpx.Client) -> None:
    end = "<|im_end|>"
    (token,) = http.post("/tokenize", json={"prompt": end, "add_special_tokens": False}).json()["tokens"]
    plain = generate(http, ignore_eos=True, max_new_tokens=4).json()["text"]
    forced = {"ignore_eos": True, "logit_bias": {str(token): 1000.0}, "min_new_tokens": 0}
    for skip in (True, False):
        body = generate(http, stop=[end], skip_special_tokens=skip, **forced).json()
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}, body
        assert body["text"] == "" and body["meta_info"]["completion_tokens"] == 1
    assert plain


def test_hostile_schemas_do_not_stop_the_others(server: LiveServer, http: httpx.Client) -> None:
    """Grammars that would compile for minutes take all places; small ones are served in between, `/health` answers, and
    when their clients have gone nothing is left of them."""
    assert generate(http, json_schema=json.dumps(SMALL_SCHEMA)).status_code == 200
    before = memory_bytes(server)
    hostile = [{"regex": "(a|b)*c?" * 3000 + "x" * i} for i in range(6)]
    answers: list[int] = []

    def attack(params: dict[str, Any]) -> None:
        with httpx.Client(base_url=server.url, timeout=5) as client:
            try:
                answers.append(generate(client, **params).status_code)
            except httpx.TimeoutException:
                answers.append(0)

    threads = [threading.Thread(target=attack, args=(params,)) for params in hostile]
    for thread in threads:
        thread.start()
    for i in range(4):
        response = generate(http, regex=f"(yes|no) {i}")
        assert response.status_code == 200 and response.json()["text"] in (f"yes {i}", f"no {i}"), response.text
        assert generate(http).status_code == 200 and http.get("/health").status_code == 200
    for thread in threads:
        thread.join()
    assert set(answers) <= {0, 400, 503}, answers
    below = psutil.Process(server.process.pid).children(recursive=True)
    (compiler,) = [each for each in below if compiles(each) and (its := each.parent()) and not compiles(its)]
    end = time.monotonic() + 300
    while compiler.children() and time.monotonic() < end:
        time.sleep(0.1)
    assert not compiler.children()
    assert memory_bytes(server) - before < 50 << 20


def test_an_ambiguous_grammar_is_given_up(http: httpx.Client) -> None:
    """It compiles at once, and every token takes longer than the one before."""
    response = generate(http, max_new_tokens=2000, ignore_eos=True, ebnf="root ::= root root root | root root | [a-z ]")
    assert response.status_code == 400 and "too long to follow" in response.json()["error"]["message"], response.text[
        :300
    ]
