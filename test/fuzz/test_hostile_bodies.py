"""Single requests that once took the memory, the time or the structured output of everybody, and connections that no
well-behaved client makes: each gets its refusal, or nothing, and the server, one for all of them, stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import httpx
import pytest
from fuzz.guarded_server import Damage, GuardedServer
from fuzz.hostile_bodies import Hostile, large_texts, lists_of_wrong_things, many_sequences, strange_texts
from fuzz.hostile_grammars import grammars, patterns
from fuzz.hostile_numbers import NUMBERS, RID, numbered_bodies
from fuzz.raw_cases import GROUPS as RAW_GROUPS
from fuzz.raw_http import run_cases
from fuzz.scale import LONG, NUMBER_STEP, TIMEOUT_S
from fuzz.target import Target, open_sessions

ANSWER_LIMIT_S = 300.0
JSON = {"content-type": "application/json"}
AGAIN = {"text": "a", "rid": RID, "sampling_params": {"max_new_tokens": 1}}
GROUPS = (patterns, grammars, lists_of_wrong_things, large_texts, strange_texts, many_sequences)


def send(url: str, hostile: Hostile) -> str:
    """What was wrong with the answer; empty if nothing."""
    limit = hostile.leave_after_s or ANSWER_LIMIT_S
    body = json.dumps(hostile.make_body())
    try:
        answer = httpx.post(url + hostile.path, content=body, headers=JSON, timeout=limit)
    except httpx.TimeoutException:
        return "" if hostile.leave_after_s else f"{hostile.name}: no answer within {limit:.0f} s"
    except httpx.TransportError as error:
        return f"{hostile.name}: {error!r}"
    if answer.status_code in hostile.statuses:
        return ""
    return f"{hostile.name}: {answer.status_code}, not one of {hostile.statuses}: {answer.text[:300]}"


def problems_of(target: Target, hostile: Hostile) -> Iterator[str]:
    """What was wrong with the answer and with the server after it."""
    url = target.server().url
    with ThreadPoolExecutor(hostile.copies) as threads:
        yield from filter(None, threads.map(lambda _: send(url, hostile), range(hostile.copies)))
    try:
        (target.check if LONG else target.check_health)()
    except (Damage, httpx.HTTPError) as damage:
        yield f"{hostile.name}: {damage}"


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_bodies(target: Target, group: Callable[[], Iterator[Hostile]]) -> None:
    """The health of the server is looked at after each, so that the one that hurt it has a name; whether it serves and
    what it gave back is looked at after all, or after each in a long run."""
    problems = []
    for hostile in group():
        for problem in problems_of(target, hostile):
            print(problem, flush=True)
            problems.append(problem.partition("\n")[0])
    target.server()
    target.check()
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems)


@pytest.mark.timeout(TIMEOUT_S)
def test_numbers(target: Target) -> None:
    """No number is a server's error in any field, and none leaves its request id behind. In a short run a number goes
    into some of the fields, the next one into others."""
    problems = []
    for start, number in enumerate(NUMBERS):
        url = target.server().url
        open_sessions(url)  # each number leaves them as it will
        with httpx.Client(headers=JSON, timeout=ANSWER_LIMIT_S) as client:
            for field, path, body in islice(numbered_bodies(number), start % NUMBER_STEP, None, NUMBER_STEP):
                answer = client.post(url + path, content=body)
                if answer.status_code not in (200, 400, 422):
                    problems.append(f"{path} {field} {number[:30]}: {answer.status_code} {answer.text[:300]}")
        reused = httpx.post(url + "/generate", json=AGAIN, timeout=ANSWER_LIMIT_S)
        if reused.status_code != 200:
            problems.append(f"{number[:30]}: the rid stays taken: {reused.text[:300]}")
        target.check_health()
    target.check()
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("group", RAW_GROUPS)
def test_raw_connections(server: GuardedServer, group: str) -> None:
    wrong = run_cases(server.live.port, RAW_GROUPS[group]())
    assert not wrong, "\n".join(wrong)
