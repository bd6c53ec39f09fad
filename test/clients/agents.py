"""Claude Code, Codex, opencode and Cline as programs that a test runs: `make clients` installs them from npm's
registry."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("AGENTS", ROOT / "build" / "agents")) / "node_modules" / ".bin"
"""AGENTS: the folder in which npm has installed them."""
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer: agents reach their server and nothing else."""
LIMIT_S = 120
FILE, BEFORE, AFTER = "notes.txt", "alpha line\n", "beta line\n"
ASKED = (f"Change alpha to beta in {FILE}.", f"Say aloud what is in {FILE}.", "What have you done?")
"""What the user says, turn by turn."""
SHOUTED, DONE = "BETA LINE", ("It says beta now.", "I have said it aloud.", "I changed a word and said it.")

ORDERED = ("--fold-system-messages", "in-place")
"""For agents that use /v1/chat/completions: not every template takes a system message, or two of the user in a row."""


class Agent(NamedTuple):
    """`command` and `environment` for a server's address. `read`, `edit` and `shout` make calls of the agent's own
    tools by the function `call(name, **arguments)`; `edited` is in the result of the second. `prepare`: what is run
    before the first turn. `flags` of the server."""

    program: str
    command: Callable[[str, bool], list[str]]
    environment: Callable[[str], dict[str, str]]
    read: Callable[[Any, str], str]
    edit: Callable[[Any, str], str]
    shout: Callable[[Any], str]
    edited: str
    prepare: Callable[[str], list[str]] | None = None
    flags: tuple[str, ...] = ()

    def script(self, call: Any, folder: Path) -> list[tuple[str, str]]:
        """The model's part of the session."""
        path = str(folder / FILE)
        return [
            (ASKED[0], self.read(call, path)),
            (BEFORE.strip(), "I edit it.\n" + self.edit(call, path)),
            (self.edited, DONE[0]),
            (ASKED[1], self.shout(call)),
            (SHOUTED, DONE[1]),
            (ASKED[2], DONE[2]),
        ]

    def say(self, url: str, folder: Path, text: str, goes_on: bool) -> str:
        """Runs one turn of the user. Returns what the agent printed."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
            **self.environment(url),
        }
        (folder / "home").mkdir(exist_ok=True)
        if self.prepare is not None and not goes_on:
            self._run(self.prepare(url), folder, environment)
        return self._run([*self.command(url, goes_on), text], folder, environment)

    def _run(self, words: list[str], folder: Path, environment: dict[str, str]) -> str:
        run = subprocess.run(
            [str(PROGRAMS / self.program), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        return run.stdout


def _claude(url: str, goes_on: bool) -> list[str]:
    return [*(["--continue"] if goes_on else []), "--dangerously-skip-permissions", "--print"]


def _codex(url: str, goes_on: bool) -> list[str]:
    provider = f'{{name = "here", base_url = "{url}/v1", wire_api = "responses"}}'
    settings = ("model_provider=here", f"model_providers.here={provider}", 'model_verbosity="medium"')
    options = [word for setting in settings for word in ("-c", setting)]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5.5"]
    return ["exec", *(["resume", "--last"] if goes_on else []), *options]


def _opencode(url: str) -> dict[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    models = {"tiny": {"limit": {"context": 131072, "output": 16384}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"model": "here/tiny", "provider": {"here": provider}})}


CLAUDE_CODE = Agent(
    program="claude",
    command=_claude,
    environment=lambda url: {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    },
    read=lambda call, path: call("Read", file_path=path),
    edit=lambda call, path: call("Edit", file_path=path, old_string="alpha", new_string="beta"),
    shout=lambda call: call("Bash", command=f"tr a-z A-Z < {FILE}", description="shout"),
    edited="has been updated",
)
CODEX = Agent(
    program="codex",
    command=_codex,
    environment=lambda url: {},
    read=lambda call, path: call("exec_command", cmd=f"cat {path}"),
    edit=lambda call, path: call(
        "apply_patch",
        input=f"*** Begin Patch\n*** Update File: {FILE}\n@@\n-{BEFORE}+{AFTER}*** End Patch",
    ),
    shout=lambda call: call("exec_command", cmd=f"tr a-z A-Z < {FILE}"),
    edited="Updated the following files",
)
OPENCODE = Agent(
    program="opencode",
    command=lambda url, goes_on: ["run", *(["--continue"] if goes_on else [])],
    environment=_opencode,
    read=lambda call, path: call("read", filePath=path),
    edit=lambda call, path: call("edit", filePath=path, oldString="alpha", newString="beta"),
    shout=lambda call: call("bash", command=f"tr a-z A-Z < {FILE}"),
    edited="Edit applied",
    flags=ORDERED,
)
CLINE = Agent(
    program="cline",
    command=lambda url, goes_on: [],  # without a terminal it continues no session: each turn is one
    environment=lambda url: {
        "CLINE_SESSION_BACKEND_MODE": "local",  # otherwise it leaves a process in the background
        "CLINE_NO_AUTO_UPDATE": "1",
    },
    read=lambda call, path: call("read_files", files=[{"path": path}]),
    edit=lambda call, path: call("editor", path=path, old_text="alpha", new_text="beta"),
    shout=lambda call: call("run_commands", commands=[f"tr a-z A-Z < {FILE}"]),
    edited="+1: beta",
    prepare=lambda url: ["auth", "-p", "openai-compatible", "-k", "none", "-m", "tiny", "-b", f"{url}/v1"],
    flags=ORDERED,
)
AGENTS = {"claude": CLAUDE_CODE, "codex": CODEX, "opencode": OPENCODE, "cline": CLINE}
