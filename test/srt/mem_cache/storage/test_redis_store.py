"""The store in Redis: by redis-py, against `redis-server` where it is on PATH, and otherwise a server of the same
protocol that knows the commands which the store sends."""

from __future__ import annotations

import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from live_server import free_port
from srt.managers.test_host_tier import PROMPT, Server
from srt.managers.test_storage_tier import EXTRA, STORAGE

from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.errors import UserError
from sglang.srt.mem_cache.storage.redis_store import RedisStore
from sglang.srt.mem_cache.storage.store import create_store

NAMES = [f"{i:065d}" for i in range(1200)]
MODULE = "sglang.srt.mem_cache.storage.redis_store"


class Session(socketserver.StreamRequestHandler):
    """Answers commands of RESP 2 that come as arrays of strings."""

    def handle(self) -> None:
        while header := self.rfile.readline():
            command = [self._string() for _ in range(int(header[1:]))]
            self.wfile.write(self._answer(command[0].upper(), command[1:]))

    def _string(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline()[1:]))
        self.rfile.readline()
        return data

    def _answer(self, name: bytes, args: list[bytes]) -> bytes:
        kept: dict[bytes, bytes] = self.server.kept  # type: ignore[attr-defined]
        if name == b"GET":
            value = kept.get(args[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if name in (b"TOUCH", b"EXPIRE"):
            return b":%d\r\n" % (args[0] in kept)
        if name == b"DEL":
            return b":%d\r\n" % (kept.pop(args[0], None) is not None)
        if name == b"SET":
            kept[args[0]] = args[1]
        elif name not in (b"PING", b"SELECT", b"CLIENT"):
            return b"-ERR unknown command\r\n"
        return b"+PONG\r\n" if name == b"PING" else b"+OK\r\n"


class LittleServer(socketserver.ThreadingTCPServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("redis-server")
    if binary is None:
        with LittleServer(("127.0.0.1", 0), Session) as server:
            server.kept = {}  # type: ignore[attr-defined]
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"redis://127.0.0.1:{server.server_address[1]}/0?protocol=2"
            server.shutdown()
        return
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    process = subprocess.Popen([binary, "--port", str(port), "--save", "", "--dir", str(folder)], stdout=-3)
    for _ in range(6000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(300)


@pytest.mark.parametrize("options", [{}, {"ttl": 600}])
def test_entries_are_kept(url: str, options: dict[str, Any]) -> None:
    store = RedisStore({"url": url, "prefix": f"test {options}:", **options})
    assert store.contains(NAMES) == [False] * len(NAMES) and store.read(NAMES[0]) is None
    for name in NAMES[:1000:7]:
        store.write(name, bytearray(name.encode()) * 3 + b"\r\n\0")
    assert store.contains(NAMES) == [i % 7 == 0 and i < 1000 for i in range(len(NAMES))]
    assert store.read(NAMES[7]) == NAMES[7].encode() * 3 + b"\r\n\0"
    store.write(NAMES[7], bytearray(1 << 20))
    assert store.read(NAMES[7]) == bytes(1 << 20)
    store.delete(NAMES[7])
    store.delete(NAMES[7])
    assert store.read(NAMES[7]) is None and store.contains(NAMES[:8]) == [True] + [False] * 7


def test_prefixes_of_keys_are_apart(url: str) -> None:
    one, other = (RedisStore({"url": url, "prefix": prefix}) for prefix in ("one:", "other:"))
    one.write(NAMES[0], bytearray(b"1"))
    assert other.contains(NAMES[:1]) == [False] and other.read(NAMES[0]) is None


def test_wrong_options(url: str) -> None:
    for options, said in (
        ({}, "url"),
        ({"url": "http://nowhere"}, "url"),
        ({"url": url, "ttl": -1}, "ttl"),
        ({"url": url, "bucket": "b"}, "bucket"),
        ({"url": "redis://:secret@127.0.0.1:1/0", "timeout": 0.2}, "does not answer"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            RedisStore(options)
        assert "secret" not in str(refused.value)


def test_the_flags_create_it(url: str) -> None:
    extra = f'{{"module_path": "{MODULE}", "class_name": "RedisStore", "url": "{url}"}}'
    config = read_storage_config("dynamic", "timeout", extra)
    assert config is not None and url not in str(config.describe())
    assert isinstance(create_store(config), RedisStore)


def test_a_server_that_starts_again_finds_what_it_stored(url: str, tmp_path: Path) -> None:
    answers = []
    for rid in ("first", "second"):
        server = Server(tmp_path, **{**STORAGE, **EXTRA})
        assert server.runner.storage is not None
        server.runner.storage.store = RedisStore({"url": url, "prefix": "server:"})
        answers.append(server.answer(rid, PROMPT))
        server.check()
        assert server.runner.storage.num_failures == 0
        assert (server.meta[rid].stored_tokens > 0) == (rid == "second")
    assert answers[0] == answers[1]
