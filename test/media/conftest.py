from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer

from media.seeing_model import write_seeing_model

LAUNCH = (str(Path(__file__).with_name("launch_seeing.py")),)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def allowed_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="session")
def server(seeing_model: Path, allowed_directory: Path) -> Iterator[LiveServer]:
    flags = ["--model-path", str(seeing_model), "--served-model-name", "seeing", "--skip-server-warmup"]
    flags += ["--allowed-local-media-path", str(allowed_directory), "--mm-per-request-timeout", "5"]
    flags += ["--media-url-max-file-size-mb", "4", "--enable-streaming-session", "--enable-metrics"]
    running = LiveServer(*flags, launch=LAUNCH)
    try:
        yield running.wait_up()
    finally:
        running.end()


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client
