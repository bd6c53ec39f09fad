"""Starts a server that plays a script, and reads what it noted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_server import LiveServer

from scripted.launch import REQUESTS
from scripted.scheduler import PROMPTS, SCRIPT

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
CONTEXT = 1_000_000
"""Tokens: the prompts of agents are long, and no model reads them here."""
FLAGS = ("--context-length", str(CONTEXT), "--served-model-name", "tiny", "--enable-cache-report")


class ScriptedServer:
    def __init__(self, server: LiveServer, folder: Path) -> None:
        self.server, self.url, self._folder = server, server.url, folder

    def prompts(self) -> list[dict[str, Any]]:
        """All prompts so far: their text as `prompt`, `tokens`, and how many of these a prefix cache would have."""
        return self._lines("prompts")

    def requests(self) -> list[dict[str, Any]]:
        return self._lines("requests")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def scripted_server(folder: Path, script: Sequence[tuple[str, str]], *flags: str) -> Iterator[ScriptedServer]:
    """`script`: as scheduler.py reads it. `folder`: for its files."""
    (folder / "script").write_text(json.dumps(script))
    paths = {SCRIPT: "script", PROMPTS: "prompts", REQUESTS: "requests"}
    os.environ.update({name: str(folder / file) for name, file in paths.items()})
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    try:
        server = LiveServer(*FLAGS, *flags, launch=(str(HERE / "launch.py"),))
    finally:
        for name in (*paths, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
            del os.environ[name]
    try:
        yield ScriptedServer(server.wait_up(), folder)
    finally:
        server.end()
