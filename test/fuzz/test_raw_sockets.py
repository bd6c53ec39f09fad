"""Connections that no well-behaved client makes: each gets its refusal, or nothing, and the server stays as it was."""

from __future__ import annotations

import pytest
from fuzz.guarded_server import GuardedServer
from fuzz.raw_cases import GROUPS
from fuzz.raw_http import run_cases


@pytest.mark.parametrize("group", GROUPS)
def test_raw_connections(server: GuardedServer, group: str) -> None:
    wrong = run_cases(server.live.port, GROUPS[group]())
    assert not wrong, "\n".join(wrong)
