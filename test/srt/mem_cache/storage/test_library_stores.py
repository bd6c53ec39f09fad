"""Stores by NIXL, Mooncake and LMCache: what they make of settings, and of a library that fails. Stand-ins take the
libraries' places; `make stores` runs the libraries themselves with their real processes (`test/stores/`)."""

from __future__ import annotations

import ctypes
import os
import socketserver
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.configs.storage_options import NIXL_PACKAGES, MooncakeOptions, NixlOptions
from sglang.srt.errors import UserError
from sglang.srt.managers import launch
from sglang.srt.mem_cache.storage import lmcache_store, mooncake_store, nixl_files
from sglang.srt.mem_cache.storage.engine import StorageEngine
from sglang.srt.mem_cache.storage.lmcache_store import ANSWER, REQUEST, LMCacheStore
from sglang.srt.mem_cache.storage.store import create_store
from sglang.srt.server_args import ServerArgs

NAMES = ["b" + f"{i:064x}" for i in range(600)]
MASTER = '{"master_server_address": "127.0.0.1:1"'


def created(backend: str, extra: str) -> Any:
    config = read_storage_config(backend, "timeout", extra)
    assert config is not None
    return create_store(config)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "extra", "said"),
    [
        ("nixl", '{"plugin": {"gds": {"active": true}}}', "the plugin gds is not supported"),
        ("nixl", '{"plugin": {"posix": {"active": true, "bucket": "b"}}}', "bucket means nothing"),
        ("nixl", '{"plugin": ["posix"]}', "plugin must be as"),
        ("nixl", '{"plugin": {"posix": {"use_uring": "true"}}}', "of plugin none is active"),
        ("nixl", '{"plugin": {"posix": {"active": "yes"}}}', "active must be true or false; got 'yes'"),
        ("nixl", '{"numjobs": 4}', "numjobs means nothing to the backend nixl"),
        ("nixl", '{"use_direct_io": "perhaps"}', "use_direct_io must be true or false"),
        ("nixl", '{"l3_cleaner_high_watermark": 120}', "at most 100 percent"),
        ("nixl", '{"l3_cleaner_high_watermark": 60, "l3_cleaner_low_watermark": 70}', "is above"),
        ("mooncake", "{}", "MOONCAKE_MASTER"),
        ("mooncake", '{"master_server_address": "host"}', "must be HOST:PORT"),
        ("mooncake", MASTER + ', "protocol": "carrier"}', "tcp or rdma"),
        ("mooncake", MASTER + ', "global_segment_size": "much"}', "global_segment_size"),
        ("mooncake", MASTER + ', "standalone_storage": true}', "standalone_storage means nothing"),
        ("lmcache", '{"url": "http://host:1"}', "lm://HOST:PORT"),
        ("lmcache", '{"url": "lm://host:99999"}', "must be HOST:PORT"),
        ("lmcache", '{"url": "lm://host:1", "timeout": -1}', "timeout"),
        ("lmcache", '{"url": "lm://host:1", "timeout": 0}', "timeout must be above 0"),
        ("file", '{"dir": "/somewhere"}', "dir means nothing to the backend file"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(backend: str, extra: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_storage_config(backend, "timeout", extra)


@pytest.mark.parametrize(
    ("backend", "extra", "said"), [("nixl", None, "pip install nixl-cu13"), ("mooncake", MASTER + "}", "libibverbs")]
)
def test_a_missing_library_is_named_before_a_process_starts(
    backend: str, extra: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NIXL_PACKAGES, "mooncake"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(launch, "EngineHandle", lambda *_: pytest.fail("a process was started"))
    args = ServerArgs.from_kwargs(
        model_path=str(DEFAULT_MODEL_PATH), device="cpu", enable_hierarchical_cache=True,
        hicache_storage_backend=backend, hicache_storage_backend_extra_config=extra,
    )  # fmt: skip
    with pytest.raises(UserError, match=said):
        launch.launch_engine(args)


def test_settings_of_nixl_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "use_direct_io": True,
        "l3_cleaner_high_watermark": 75.0,
        "plugin": {"gds": {"active": False}, "posix": {"active": True, "use_uring": "true"}},
    }
    assert NixlOptions.read(options) == NixlOptions({"use_uring": "true"}, 0.25)
    assert NixlOptions.read({"use_aio": True, "max_size": "1G", "l3_cleaner_enabled": False}) == NixlOptions(
        {"use_aio": "true"}, 0.0, {"max_size": "1G"}
    )
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "OBJ")
    with pytest.raises(UserError, match="the plugin OBJ is not supported"):
        NixlOptions.read({})
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", "/a,/b")
    _give_nixl(monkeypatch, FakeNixl())
    with pytest.raises(UserError, match="one directory"):
        created("nixl", '{"plugin": {"posix": {"active": true}}}')


def test_settings_of_mooncake_may_be_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "[::1]:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb")
    made = MooncakeOptions.read({"local_buffer_size": 1 << 20})
    assert (made.address, made.segment_bytes, made.buffer_bytes) == (("::1", 50051), 2 * 10**9, 1 << 20)
    assert made.metadata == "P2PHANDSHAKE" and made.protocol == "tcp"


# --- NIXL -------------------------------------------------------------------------------------------------------------


class FakeNixl:
    """The part of NIXL's interface that is used; `states` are those of the next transfers."""

    def __init__(self, *states: str) -> None:
        self.states, self.registered, self.moved = list(states), 0, 0
        self._api = SimpleNamespace(nixl_agent=lambda name, config: self, nixl_agent_config=lambda backends: None)
        self.name = "agent"

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        if "bad" in parameters.values():
            raise RuntimeError("NIXL_ERR_INVALID_PARAM")

    def register_memory(self, regions: list[Any], kind: str, plugins: list[str]) -> list[Any]:
        self.registered += 1
        return regions

    def deregister_memory(self, regions: list[Any], plugins: list[str]) -> None:
        self.registered -= 1

    def get_xfer_descs(self, regions: list[Any], kind: str) -> list[Any]:
        return regions

    def initialize_xfer(self, operation: str, here: list[Any], there: list[Any], *_: object) -> Any:
        return operation, here[0], there[0]

    def transfer(self, transfer: Any) -> str:
        operation, (address, size, _), (_, _, file) = transfer
        data = (ctypes.c_char * size).from_address(address)
        self.moved += size
        if operation == "WRITE":
            os.pwrite(file, data.raw, 0)
        else:
            data[:] = os.pread(file, size, 0)
        return self.states.pop(0) if self.states else "DONE"

    check_xfer_state = transfer

    def release_xfer_handle(self, transfer: Any) -> None:
        pass


def _give_nixl(patch: pytest.MonkeyPatch, fake: FakeNixl) -> None:
    patch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    patch.setitem(sys.modules, "nixl._api", fake._api)  # type: ignore[arg-type]


def test_nixl_moves_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNixl()
    _give_nixl(monkeypatch, fake)
    store = created("nixl", f'{{"storage_dir": "{tmp_path}/files", "l3_cleaner_high_watermark": 99.999}}')
    data = bytearray(os.urandom(10_001))
    store.write(NAMES[0], data)
    assert store.contains(NAMES[:2]) == [True, False]
    assert store.read(NAMES[0]) == data and store.read(NAMES[1]) is None
    assert fake.moved == 2 * len(data) and not fake.registered
    store.delete(NAMES[0])
    assert store.contains(NAMES[:1]) == [False]


def test_a_transfer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNixl("ERR", "PROC", "DONE")
    _give_nixl(monkeypatch, fake)
    store = created("nixl", f'{{"storage_dir": "{tmp_path}/files", "min_free_space": 0}}')
    with pytest.raises(OSError, match="ERR"):
        store.write(NAMES[0], bytearray(100))
    assert store.contains(NAMES[:1]) == [False] and not list((tmp_path / "files").rglob(".tmp-*"))
    store.write(NAMES[0], bytearray(100))
    monkeypatch.setattr(nixl_files, "MOVE_LIMIT_S", -1.0)
    fake.states = ["PROC"]
    with pytest.raises(TimeoutError):
        store.read(NAMES[0])
    assert not fake.registered and store._transfer._abandoned == [bytearray(100)]


def test_what_nixl_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NIXL_PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install nixl-cu13"):
        created("nixl", "{}")
    with pytest.raises(UserError, match="NIXL_ERR_INVALID_PARAM"):
        nixl_files.NixlTransfer(FakeNixl()._api, {"use_uring": "bad"})


# --- Mooncake ---------------------------------------------------------------------------------------------------------


class FakeClient:
    def __init__(self, full: int = 0) -> None:
        self.kept: dict[str, bytes] = {}
        self.full, self.closed, self.lost = full, 0, False

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [-900 if self.lost else int(name in self.kept) for name in names]

    def get(self, name: str) -> bytes:
        return self.kept.get(name, b"")

    def put(self, name: str, data: bytearray) -> int:
        self.full -= 1
        if self.full >= 0:
            return mooncake_store.NO_ROOM
        self.kept[name] = bytes(data)
        return -900 if self.lost else 0

    def remove(self, name: str, force: bool) -> int:
        return -900 if self.lost else 0 if self.kept.pop(name, None) is not None else mooncake_store.NOT_FOUND

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient(full=2)
    monkeypatch.setattr(mooncake_store, "_connect", lambda options: fake)
    monkeypatch.setattr(mooncake_store, "ROOM_POLL_S", 0.0)
    return fake


def test_mooncake_keeps_entries(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    store = created("mooncake", MASTER + ', "local_buffer_size": 100, "key": "secret"}')
    assert store.key == b"secret" and store.contains([]) == []
    store.write(NAMES[0], bytearray(b"data"))
    assert store.contains(NAMES[:2]) == [True, False] and store.read(NAMES[0]) == b"data"
    assert store.read(NAMES[1]) is None
    store.delete(NAMES[0])
    store.delete(NAMES[0])
    with pytest.raises(ValueError, match="local_buffer_size is 100"):
        store.write(NAMES[0], bytearray(101))
    client.full = 1 << 30
    monkeypatch.setattr(mooncake_store, "ROOM_LIMIT_S", 0.0)
    with pytest.raises(OSError, match="-200"):
        store.write(NAMES[0], bytearray(1))
    client.lost, client.full = True, 0
    for call in (lambda: store.contains(NAMES), lambda: store.delete(NAMES[0])):
        with pytest.raises(OSError, match="-900"):
            call()


def test_mooncake_is_closed_only_where_its_master_answers(client: FakeClient) -> None:
    """Without a master the library holds the interpreter's lock for a quarter of a minute."""
    options = MooncakeOptions.read({"master_server_address": "127.0.0.1:1"})
    mooncake_store.MooncakeStore(options).close()
    assert not client.closed
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as master:
        options = MooncakeOptions.read({"master_server_address": f"127.0.0.1:{master.server_address[1]}"})
        mooncake_store.MooncakeStore(options).close()
    assert client.closed == 1


def test_a_missing_mooncake_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UserError, match="pip install mooncake-transfer-engine"):
        created("mooncake", MASTER + "}")
    there = ModuleType("mooncake.store")
    there.MooncakeDistributedStore = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", there)
    with pytest.raises(UserError, match="no master answers at 127.0.0.1:1"):
        created("mooncake", MASTER + "}")


# --- LMCache ----------------------------------------------------------------------------------------------------------


class Session(socketserver.BaseRequestHandler):
    """Answers as an LMCache server does."""

    def handle(self) -> None:
        server: Any = self.server
        while len(head := self._take(REQUEST.size)) == REQUEST.size:
            command, size, *_, key = REQUEST.unpack(head)
            server.commands.append(command)
            if server.dies:
                return
            if command == lmcache_store.PUT:
                server.kept[key] = self._take(size)
                continue
            data = server.kept.get(key, b"") if command == lmcache_store.GET else b""
            there = key in server.kept or command == lmcache_store.HEALTH
            self.request.sendall(ANSWER.pack(200 if there else 400, len(data), *[0] * 7) + data)

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.request.recv(size - len(data))):
            data += more
        return data


class LittleServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    kept: dict[bytes, bytes]
    commands: list[int]
    dies = False


@pytest.fixture
def lmcache() -> Iterator[LittleServer]:
    with LittleServer(("127.0.0.1", 0), Session) as server:
        server.kept, server.commands = {}, []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def opened(server: LittleServer) -> LMCacheStore:
    store: LMCacheStore = created("lmcache", f'{{"url": "lm://127.0.0.1:{server.server_address[1]}/"}}')
    return store


def test_lmcache_keeps_entries(lmcache: LittleServer) -> None:
    store, data = opened(lmcache), bytearray(os.urandom(100_001))
    store.write(NAMES[0], data)
    assert store.contains(NAMES) == [True] + [False] * 599
    assert store.read(NAMES[0]) == data and store.read(NAMES[1]) is None
    store.delete(NAMES[0])
    store.delete(NAMES[1])
    assert store.read(NAMES[0]) is None and store.contains(NAMES[:1]) == [False]
    assert len(lmcache.kept) == 1, "nothing is written for what was not there"
    assert opened(lmcache).read(NAMES[0]) is None
    store.write(NAMES[0], data)
    assert store.contains(NAMES[:1]) == [True] and opened(lmcache).read(NAMES[0]) == data
    with pytest.raises(ValueError, match="at most"):
        store.write(NAMES[0], HugeData())
    store.close()


class HugeData(bytearray):
    def __len__(self) -> int:
        return 1 << 31


def test_a_connection_that_broke_is_made_again(lmcache: LittleServer) -> None:
    store = opened(lmcache)
    store.write(NAMES[0], bytearray(b"data"))
    lmcache.dies = True
    for call in (lambda: store.contains(NAMES), lambda: store.read(NAMES[0])):
        with pytest.raises(OSError):
            call()
    lmcache.dies = False
    assert store.read(NAMES[0]) == b"data"
    with pytest.raises(UserError, match="no LMCache server answers"):
        created("lmcache", '{"url": "lm://127.0.0.1:1", "timeout": 1}')


# --- the engine -------------------------------------------------------------------------------------------------------


def test_the_last_thread_closes_the_store() -> None:
    closed = threading.Event()
    store = SimpleNamespace(close=closed.set)
    StorageEngine(store, [], b"", 1, 0).close()  # type: ignore[arg-type]
    assert closed.wait(300)
