"""Clients of other projects, over a socket, against the embedded model, which can call functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import LiveServer, live_server

MODEL = "tiny"
PERSON = (
    'Text: Ada is 36 years old.\nSchema: {"type": "object", "properties": {"name": {"type": "string"}, '
    '"age": {"type": "integer"}}, "required": ["name", "age"]}\nAnswer with JSON only.'
)
"""A form as the model was trained to fill in."""


@pytest.fixture(scope="session")
def served() -> Iterator[LiveServer]:
    flags = ("--served-model-name", MODEL, "--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*flags) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(served: LiveServer) -> str:
    return f"{served.url}/v1"
