from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """One server for all tests that leave it as they found it."""
    with live_server("--enable-metrics", "--enable-cache-report", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="session")
def parsing_server() -> Iterator[LiveServer]:
    """As `server`, of one that reads thoughts and calls out of the answers."""
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*parsers, "--served-model-name", "tiny", "--enable-cache-report") as running:
        yield running


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made
