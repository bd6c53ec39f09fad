"""Servers with prefixes in files that are killed while they write, and files that are damaged then: the next start
gives the answers of a server without any cache."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server

KILLS, PROMPTS = 4, 6


def prompts() -> list[list[int]]:
    """Trees of 200 to 500 tokens."""
    rng = random.Random(0)
    trunks = [[rng.randrange(5, 400) for _ in range(600)] for _ in range(2)]
    return [rng.choice(trunks)[: rng.randrange(150, 400)] + trunks[0][: rng.randrange(50, 100)] for _ in range(PROMPTS)]


def ask(url: str, ids: list[int]) -> tuple[str, int]:
    """Returns the text and how many tokens came from the files."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return answer["text"], details.get("storage", 0)


def flags(directory: Path) -> list[str]:
    extra = json.dumps({"storage_dir": str(directory), "max_size": "200M", "prefetch_threshold": 64})
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", "1", "--max-total-tokens", "1024", "--enable-metrics"),
        *("--hicache-write-policy", "write_through", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", extra, "--hicache-storage-prefetch-policy", "wait_complete"),
    ]


def kill_while_it_writes(server: LiveServer, rng: random.Random) -> None:
    """All of its processes, somewhere between the first byte of a file and the last one."""

    def load() -> None:
        for ids in rng.sample(prompts(), PROMPTS):
            try:
                ask(server.url, ids)
            except httpx.HTTPError:
                return

    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(rng.uniform(0.05, 1.0))
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    thread.join()


def damage(directory: Path, rng: random.Random) -> int:
    """Flips a bit, cuts off, empties or exchanges every third file. Returns how many."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".tmp-"))
    chosen = files[::3]
    for number, path in enumerate(chosen):
        data = bytearray(path.read_bytes())
        if number % 4 == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif number % 4 == 1:
            del data[rng.randrange(len(data)) :]
        elif number % 4 == 2:
            data.clear()
        else:
            data = bytearray(files[(files.index(path) + 1) % len(files)].read_bytes())
        path.write_bytes(data)
    return len(chosen)


@pytest.mark.slow
@pytest.mark.failures
def test_a_server_that_was_killed_starts_rightly(tmp_path: Path) -> None:
    rng, directory = random.Random(1), tmp_path / "files"
    with live_server("--disable-radix-cache") as plain:
        wanted = [ask(plain.url, ids)[0] for ids in prompts()]
    stored = 0
    for _ in range(KILLS):
        with live_server(*flags(directory)) as server:
            for ids, text in zip(prompts(), wanted, strict=True):
                got, from_files = ask(server.url, ids)
                assert got == text
                stored += from_files
            httpx.post(f"{server.url}/flush_cache").raise_for_status()
            kill_while_it_writes(server, rng)
    assert stored > 0, "nothing was ever read from files"
    assert damage(directory, rng) > 3
    (directory / "zz").mkdir(exist_ok=True)
    (directory / "zz" / "of somebody else").write_bytes(b"1")
    with live_server(*flags(directory)) as server:
        assert [ask(server.url, ids)[0] for ids in prompts()] == wanted
        metrics = httpx.get(f"{server.url}/metrics").text
    corrupt = [line for line in metrics.splitlines() if line.startswith("sglang:storage_corrupt_entries_total")]
    assert corrupt and float(corrupt[0].split()[-1]) > 0
    assert (directory / "zz" / "of somebody else").exists()
