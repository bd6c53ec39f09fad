"""A store that never answers: nobody waits for it longer than its limit, and what it does when it comes back touches
nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.cache_tier import CopyState
from sglang.srt.mem_cache.storage import tier as tiers
from sglang.srt.mem_cache.storage.prefix_names import PrefixNames
from srt.managers.test_host_tier import OTHER, PROMPT
from srt.managers.test_storage_tier import StorageServer, details, make_sizes_small, short_pauses


class HungFiles:
    """The gates of a server's files: calls of the named methods wait there."""

    def __init__(self, server: StorageServer) -> None:
        self.server, self.store, self.gate = server, server.files, threading.Event()
        self.waiting = 0
        self.done: list[Any] = []
        """First arguments of the calls that went on."""
        self._lock = threading.Lock()

    def hang(self, *methods: str) -> None:
        for method in methods:
            setattr(self.store, method, self._behind_the_gate(getattr(self.store, method)))

    def _behind_the_gate(self, call: Any) -> Any:
        def waits(*args: object) -> object:
            with self._lock:
                self.waiting += 1
            assert self.gate.wait(300)
            try:
                return call(*args)
            finally:
                with self._lock:
                    self.done.append(args[0])
                    self.waiting -= 1

        return waits

    def reached(self, count: int) -> None:
        """Steps until so many calls wait."""
        deadline = time.monotonic() + 300
        while self.waiting < count:
            assert time.monotonic() < deadline
            self.server.steps(1)

    def open(self) -> None:
        """The store answers again, and all that it was asked for has ended."""
        self.gate.set()
        deadline = time.monotonic() + 300
        while self.waiting or self.server.storage._hung:
            assert time.monotonic() < deadline
            self.server.storage.finish()


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    make_sizes_small(monkeypatch, tmp_path)
    with short_pauses():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


TIMEOUT = '{"prefetch_threshold": 1, "prefetch_timeout_base": 0.05, "prefetch_timeout_per_ki_token": 0}'
SHORT = {"hicache_storage_prefetch_policy": "timeout", "hicache_storage_backend_extra_config": TIMEOUT}


def host_bytes(server: StorageServer) -> list[torch.Tensor]:
    return [pool.host.clone() for pool in server.copies.pools]


@pytest.mark.parametrize("method", ["contains", "read"])
def test_a_flush_waits_for_no_file(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "HANG_S", 0.5)
    server = StorageServer(folder, **SHORT)
    answer = server.answer("first", PROMPT)
    server.forget()
    files = HungFiles(server)
    files.hang(method)
    server.add("waits", PROMPT)
    files.reached(1)
    assert server.answer_of("waits") == answer
    server.forget()
    assert files.waiting, "the file has not answered yet"
    assert server.answer("other", OTHER) and server.answer("again", PROMPT) == answer
    before = host_bytes(server)
    files.open()
    assert all(torch.equal(old, new) for old, new in zip(before, host_bytes(server), strict=True))
    server.rest()
    server.forget()
    server.check()


def test_a_hung_write_reads_no_page_later(folder: Path) -> None:
    server = StorageServer(folder)
    files = HungFiles(server)
    files.hang("write")
    server.add("first", PROMPT)
    answer = server.answer_of("first")
    files.reached(1)
    assert server.storage._backup is not None
    job = server.storage._backup.job
    server.forget()
    assert files.waiting == 1 and job.state is CopyState.UNDER_WAY
    for pool in server.copies.pools:
        pool.host.fill_(77)
    assert server.answer("again", PROMPT) == answer and details(server, "again") == {"storage": 0}
    server.rest()
    assert files.waiting == 1, "nothing more is written"
    server.forget()
    files.open()
    after = StorageServer(folder)
    assert after.answer("next start", PROMPT) == answer
    server.rest()
    server.check()


def test_a_bad_prefix_leaves_without_the_store(folder: Path) -> None:
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    engine = server.runner.storage
    names = PrefixNames(engine.fingerprint, np.array(PROMPT), None, engine.block)
    entries = [names.block(i) for i in range(len(PROMPT) // engine.block)]
    assert all(server.files.contains(entries))
    files = HungFiles(server)
    files.hang("delete", "read")
    weights = server.runner.model.embed.weight
    with torch.inference_mode():
        row = weights[PROMPT[-1]].clone()
        weights[PROMPT[-1]] = torch.nan
        server.add("breaks", PROMPT)
        server.answer_of("breaks")
        weights[PROMPT[-1]] = row
    assert server.collector.finish["breaks"].status_code == 500
    server.forget()
    server.add("again", PROMPT)
    assert server.answer_of("again") == answer and details(server, "again") == {"storage": 0}, "nothing is looked up"
    files.reached(1)
    assert files.waiting == 1
    files.gate.set()
    server.rest()
    assert {*entries} <= {*files.done}, "all were removed"
    server.check()


def test_removals_beyond_their_limit_end_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_REMOVED_TOKENS", 2 * len(PROMPT))
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    files = HungFiles(server)
    files.hang("delete")
    for _ in range(3):
        server.storage.remove(np.array(PROMPT), None)
    assert len(server.storage._removals) == 2
    files.gate.set()
    server.rest()
    server.forget()
    assert server.answer("again", PROMPT) == answer and details(server, "again") == {"storage": 0}
    server.check()


def test_waiting_for_everything_has_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "HANG_S", 0.05)
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    server.forget()
    files = HungFiles(server)
    files.hang("read")
    for number in range(4):
        server.add(f"waits {number}", [*PROMPT, number])
        server.answer_of(f"waits {number}")
        server.forget()
    files.reached(2)
    assert files.waiting == 2, "both threads; others were not asked to wait for one"
    assert not server.storage.busy, "an idle server does not ask again and again"
    files.open()
    assert server.answer("again", PROMPT) == answer
    server.rest()
    server.check()


def test_a_hung_store_is_detached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "CLOSE_S", 0.05)
    server = StorageServer(folder, **SHORT)
    server.answer("first", PROMPT)
    server.forget()
    files = HungFiles(server)
    files.hang("read", "delete")
    server.add("waits", PROMPT)
    server.answer_of("waits")
    server.storage.remove(np.array(PROMPT), None)
    files.reached(2)
    server.tier.detach()
    assert files.waiting == 2 and server.tier.storage is None
    files.gate.set()
    server.rest()


def test_a_pipe_in_place_of_an_entry_is_a_miss(folder: Path, tmp_path: Path) -> None:
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    server.forget()
    entries = [path for path in server.files.directory.glob("??/*") if path.is_file()]
    assert entries
    for path in entries:
        path.unlink()
        os.mkfifo(path)
    assert server.answer("again", PROMPT) == answer and details(server, "again") == {"storage": 0}
    server.rest()
    assert server.runner.storage.num_corrupt
    server.check()
