"""System messages among others, in every API, with templates that take them at the beginning or nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted.server import TEMPLATES, ScriptedServer, scripted_server

NAMES = ["system_first", "alternating", "no_system"]
TURNS = [("user", "the question"), ("system", "a reminder"), ("assistant", "an answer"), ("user", "the rest")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
TEXTS = ["the rules", *(text for _, text in TURNS)]
BODIES = {
    "/v1/messages": {"max_tokens": 9, "system": "the rules", "messages": MESSAGES},
    "/v1/responses": {"instructions": "the rules", "input": MESSAGES},
    "/v1/chat/completions": {"messages": [{"role": "system", "content": "the rules"}, *MESSAGES]},
    "/api/chat": {"stream": False, "messages": [{"role": "system", "content": "the rules"}, *MESSAGES]},
}


def served(folder: Path, name: str, *flags: str) -> Any:
    return scripted_server(folder, [], "--chat-template", str(TEMPLATES / f"{name}.jinja"), *flags)


@pytest.fixture(scope="module", params=NAMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with served(tmp_path_factory.mktemp("server"), request.param) as running:
        yield running


@pytest.fixture(scope="module")
def folding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with served(tmp_path_factory.mktemp("folding"), "system_first", "--fold-system-messages", "first") as running:
        yield running


def post(server: ScriptedServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=300)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_agents_send_system_messages_anywhere(server: ScriptedServer, path: str) -> None:
    answer = post(server, path, BODIES[path])
    assert answer.status_code == 200, answer.text
    prompt = server.prompts()[-1]["prompt"]
    assert all(text in prompt for text in TEXTS)
    assert prompt.index("the rules") < prompt.index("the question") < prompt.index("a reminder")
    assert "the question\n\n<system-reminder>\na reminder\n</system-reminder>" in prompt, "what is before it is cached"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_chats_are_as_the_client_wrote_them(server: ScriptedServer, path: str) -> None:
    assert post(server, path, BODIES[path]).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_the_flag_holds_for_every_api(folding: ScriptedServer, path: str) -> None:
    answer = post(folding, path, BODIES[path])
    assert answer.status_code == 200, answer.text
    prompt = folding.prompts()[-1]["prompt"]
    assert prompt.index("the rules") < prompt.index("a reminder") < prompt.index("the question")


def test_counted_tokens_are_those_of_the_prompt(server: ScriptedServer) -> None:
    body = BODIES["/v1/messages"]
    counted = post(server, "/v1/messages/count_tokens", body).json()["input_tokens"]
    post(server, "/v1/messages", body)
    assert server.prompts()[-1]["tokens"] == counted
    given = BODIES["/v1/responses"]
    assert post(server, "/v1/responses/input_tokens", given).json()["input_tokens"] == counted


def test_truncation_counts_what_the_template_reads(server: ScriptedServer) -> None:
    answer = post(server, "/v1/responses", {**BODIES["/v1/responses"], "truncation": "auto"})
    assert answer.status_code == 200, answer.text


def test_the_log_says_what_is_moved(server: ScriptedServer) -> None:
    assert "chat template: it takes system messages" in server.server.log()
