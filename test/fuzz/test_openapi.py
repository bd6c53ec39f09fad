"""Every operation of /openapi.json, with requests that its description allows and with many that it does not.

`make fuzz` sends all of them. `make test` sends an operation the first of the values at the edges of its fields and
some of the others, and no list or text that is too long by one where that takes thousands (`scale`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from fuzz.guarded_server import GuardedServer
from fuzz.scale import API_EXAMPLES, EDGES_AT_FIRST, EDGES_STEP, LONG, LONGEST_EDGE, TIMEOUT_S
from fuzz.target import Target
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.generation.meta import TestPhase
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sglang.srt.entrypoints.http_app import create_api
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.server_args import ServerArgs

API = create_api(ServerState(ServerArgs(model_path="any"))).openapi()


def without_long_limits(part: Any) -> Any:
    """A part of the description without limits of lists and texts beyond LONGEST_EDGE."""
    if isinstance(part, dict):
        limits = {name for name in ("maxItems", "maxLength") if isinstance(part.get(name), int)}
        kept = {name: value for name, value in part.items() if name not in limits or value <= LONGEST_EDGE}
        return {name: without_long_limits(value) for name, value in kept.items()}
    return [without_long_limits(value) for value in part] if isinstance(part, list) else part


SCHEMA = schemathesis.openapi.from_dict(without_long_limits(API))
OPERATIONS = [found.ok().label for found in SCHEMA.get_all_operations()]
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
UNDO = {"/pause_generation": "/continue_generation", "/start_profile": "/stop_profile"}
PROFILER = re.compile("_profile$")
ANSWER_LIMIT_S = 300.0
USER = [{"role": "user", "content": "a"}]
SHORT_ANSWERS: dict[str, dict[str, Any]] = {
    "/generate": {"sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/api/chat": {"messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
}
"""What is in the body, or stands there if nothing does: numbers always."""
SETTINGS = settings(
    max_examples=API_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
REFUSED_FIELDS = ("image_data", "video_data", "lora_path", "session_params", "previous_response_id")
"""What this model has no use for, whatever the value."""


def test_the_served_description_is_the_tested_one(server: GuardedServer) -> None:
    assert httpx.get(f"{server.url}/openapi.json").json() == API


@pytest.fixture(scope="module")
def given_up(target: Target) -> Iterator[None]:
    """The profiler's libraries stay in memory, so the server cannot be compared with what it was before."""
    yield
    target.end()


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if not PROFILER.search(name)])
@pytest.mark.timeout(TIMEOUT_S)
def test_operation(operation: str, server: GuardedServer) -> None:
    send_requests(operation, send_request, server.url)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if PROFILER.search(name)])
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("given_up")
def test_profiler(operation: str, target: Target) -> None:
    send_requests(operation, exchange, target.server().url)
    target.check_health()


def send_requests(operation: str, send: Callable[..., None], url: str) -> None:
    """Draws the requests of one operation here: drawing those of all while tests are collected costs each process of
    pytest half a minute."""
    numbers = itertools.count()

    def send_some(case: schemathesis.Case, url: str) -> None:
        number = next(numbers)
        at_edge = case.meta is not None and case.meta.phase.name is TestPhase.COVERAGE
        if not at_edge or number < EDGES_AT_FIRST or number % EDGES_STEP == 0:
            send(case, url)

    (drawn,) = get_all_tests(
        schema=SCHEMA.include(name=operation), test_func=send_some, settings=SETTINGS, given_kwargs=None
    )
    _, test = drawn.ok()
    test(url=url)


def send_request(case: schemathesis.Case, url: str) -> None:
    if case.path not in SHORT_ANSWERS or not isinstance(case.body, dict):
        exchange(case, url)
        return
    bodies = [mended(case.body, case.path), *([case.body] if LONG else [])]
    for case.body in bodies:
        exchange(case, url)


def exchange(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, timeout=ANSWER_LIMIT_S)
    if case.path in UNDO:
        httpx.post(url + UNDO[case.path], timeout=ANSWER_LIMIT_S)
    case.validate_response(response, checks=CHECKS)


def mended(body: dict[str, Any], path: str) -> dict[str, Any]:
    """`body` without what is refused so early that nothing behind it is reached, and with a short answer."""
    kept = {name: value for name, value in body.items() if name not in REFUSED_FIELDS}
    if path == "/generate" and (kept.get("text") is None) == (kept.get("input_ids") is None):
        kept |= {"text": "a", "input_ids": None}
    for name, value in SHORT_ANSWERS[path].items():
        given = kept.get(name)
        if isinstance(value, dict):
            kept[name] = {**(given if isinstance(given, dict) else {}), **value}
        elif not given or isinstance(value, int):
            kept[name] = value
    return kept
