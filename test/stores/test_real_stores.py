"""Servers with the libraries' real stores: sessions come back in a server that starts again and in another one, and a
store that dies ends no request. `make stores` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import PYTHON_ROOT, LiveServer, live_server
from stores.real_stores import INSTALLED, RealStore, environment, running

pytestmark = [pytest.mark.stores, pytest.mark.timeout(600)]

IDS = [5 + i * 7 % 200 for i in range(300)]


def ask(server: LiveServer, ids: list[int]) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    answer: dict[str, Any] = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
    return answer


def metric(server: LiveServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang:{name}"))


def wait_for_tokens(server: LiveServer, name: str, least: int) -> None:
    deadline = time.monotonic() + 300
    while metric(server, name) < least:
        assert time.monotonic() < deadline, server.log()[-3000:]
        ask(server, [9, 8, 7])
        time.sleep(0.2)


def flags(store: RealStore) -> list[str]:
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", "1", "--enable-metrics", "--max-total-tokens", "2048"),
        *("--hicache-storage-backend", store.backend, "--hicache-storage-backend-extra-config", store.extra),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--hicache-write-policy", "write_through"),
    ]


@pytest.fixture(params=["nixl", "mooncake", "lmcache"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    assert (INSTALLED / name).is_dir(), f"{name} is not installed: run `make stores`"
    return name


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_a_store_keeps_entries(backend: str, tmp_path: Path) -> None:
    with running(backend, tmp_path) as store:
        command = [sys.executable, str(Path(__file__).with_name("contract.py")), backend, store.extra]
        path = os.pathsep.join([PYTHON_ROOT, os.environ["PYTHONPATH"]])
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=300)
    assert done.stdout.split()[-1:] == [b"kept"], done.stderr.decode()[-3000:]


def test_sessions_come_back_and_a_dead_store_ends_no_request(backend: str, tmp_path: Path) -> None:
    with running(backend, tmp_path) as store:
        with live_server(*flags(store), fresh=True) as first:
            answer = ask(first, IDS)
            wait_for_tokens(first, "backuped_tokens_total", 256)
            with live_server(*flags(store), fresh=True) as other:
                said = ask(other, IDS)
                assert said["text"] == answer["text"] and metric(other, "storage_failures_total") == 0
                assert said["meta_info"]["cached_tokens_details"]["storage"] == 256, "from a server that runs"
        with live_server(*flags(store), fresh=True) as again:
            said = ask(again, [*IDS, 3])
            assert said["meta_info"]["cached_tokens_details"]["storage"] == 256, "from one that has ended"
            store.kill()
            began = time.monotonic()
            alone = ask(again, IDS[::-1])
            wait_for_tokens(again, "storage_failures_total", 1) if store.processes else None
            assert ask(again, IDS[::-1])["text"] == alone["text"]
            assert "Traceback" not in again.log()
            print(f"{backend}: requests went on {time.monotonic() - began:.1f} s after the store had died")
            assert again.health() == 200


def test_a_store_that_does_not_answer_stops_the_start(backend: str, tmp_path: Path) -> None:
    with running(backend, tmp_path) as store:
        pass
    if not store.processes:
        (tmp_path / "files").write_text("a file in the directory's place")
    server = LiveServer(*flags(store), fresh=True)
    try:
        assert server.wait_exit(120) != 0
        assert "cannot be used" in server.log() or "answers at" in server.log(), server.log()[-3000:]
    finally:
        server.end()
