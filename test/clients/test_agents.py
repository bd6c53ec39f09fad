"""Claude Code, Codex, opencode and Cline edit a file and run a command in three turns, with a chat template of each
kind. What the model says is a script; the rest is real.

RECORD=NAME writes what one of them sends to test/scripted/recorded, and test_recorded_agents.py sends it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted.answers import SERVED
from scripted.recording import record
from scripted.server import scripted_server

from .agents import AFTER, AGENTS, ASKED, BEFORE, DONE, FILE, PROGRAMS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("name", AGENTS)
def test_session(name: str, kind: str, tmp_path: Path) -> None:
    agent, served = AGENTS[name], SERVED[kind]
    if not (PROGRAMS / agent.program).exists():
        pytest.skip(f"{agent.program} is not installed: make clients, which needs npm")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / FILE).write_text(BEFORE)
    with scripted_server(tmp_path, agent.script(served.call, folder), *served.flags, *agent.flags) as server:
        for number, (asked, done) in enumerate(zip(ASKED, DONE, strict=True)):
            assert done in agent.say(server.url, folder, asked, goes_on=number > 0)
        assert (folder / FILE).read_text() == AFTER
        answers = [request for request in server.requests() if request["method"] == "POST"]
        assert {request["status"] for request in answers} == {200}
        prompts = server.prompts()
    if kind == "alternating" and os.environ.get("RECORD") == name:  # whose ids of calls every template takes
        record(name, answers, str(folder), (*ASKED, *DONE, BEFORE, AFTER, agent.edited))
    later = [prompt["cached"] / prompt["tokens"] for prompt in prompts[1:]]
    print(f"{name}, {kind}: {[prompt['tokens'] for prompt in prompts]} tokens, cached {[f'{s:.1%}' for s in later]}")
