"""Entries in files: what is written comes back; what is bad, foreign, too much or impossible to write does no harm."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.mem_cache.cache_tier import CopyState
from sglang.srt.mem_cache.storage import store as stores
from sglang.srt.mem_cache.storage.engine import Lookup, PrefixPages, Read, Removal, StorageEngine, StorageJob, Write
from sglang.srt.mem_cache.storage.entry import HEADER_BYTES, new_entry, problem, seal
from sglang.srt.mem_cache.storage.file_store import FileStore
from sglang.srt.mem_cache.storage.prefix_names import PrefixNames, block_tokens
from sglang.srt.mem_cache.storage.store import create_store

PAGE, TOKENS = 16, 208
"""Three blocks of four pages, and one page more."""
NAMES = [letter * 65 for letter in "abcdefgh"]


def entry(name: str, size: int = 1000) -> bytearray:
    data = new_entry(size)
    data[HEADER_BYTES:] = np.random.default_rng(ord(name[0])).bytes(size)
    seal(name, data)
    return data


def store(tmp_path: Path, **options: Any) -> FileStore:
    return FileStore(tmp_path / "files", **{"min_free": 0, **options})


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "files").glob("??/*") if path.is_file())


# --- files ------------------------------------------------------------------------------------------------------------


def counted(folder: Path) -> int:
    """The bytes of all entries, as the processes that write have counted them."""
    (total,) = (folder / "files").glob(".total-*")
    return int(total.read_bytes())


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    written = store(tmp_path)
    for name in NAMES[:2]:
        written.write(name, entry(name))
    again = store(tmp_path)
    assert again.contains(NAMES[:3]) == [True, True, False]
    assert again.read(NAMES[0]) == entry(NAMES[0]) and again.read(NAMES[2]) is None
    again.delete(NAMES[0])
    again.delete(NAMES[0])
    assert again.contains(NAMES[:2]) == [False, True]
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    limited = store(tmp_path, max_bytes=6 * (1000 + HEADER_BYTES), keep_ratio=0.7)
    for name in NAMES[:6]:
        limited.write(name, entry(name))
    assert limited.contains(NAMES[:2]) == [True, True], "these two were used"
    limited.write(NAMES[6], entry(NAMES[6]))
    assert limited.contains(NAMES[:7]) == [True, True, False, False, False, True, True]
    with pytest.raises(OSError, match="does not fit"):
        limited.write(NAMES[7], entry(NAMES[7], 10_000))


def test_of_a_chain_the_beginning_stays_longest(tmp_path: Path) -> None:
    limited = store(tmp_path, max_bytes=6 * (1000 + HEADER_BYTES), keep_ratio=0.7)
    for name in NAMES[:6]:
        limited.write(name, entry(name))
    limited.contains(NAMES[:6])
    limited.write(NAMES[6], entry(NAMES[6]))
    assert limited.contains(NAMES[:6]) == [True] * 3 + [False] * 3


def test_what_others_have_left_is_not_touched(tmp_path: Path) -> None:
    limited = store(tmp_path, max_bytes=3 * (1000 + HEADER_BYTES))
    folder = tmp_path / "files" / "aa"
    folder.mkdir()
    foreign, old, new = folder / "README.md", folder / ".tmp-1-1-old", folder / ".tmp-1-2-new"
    for path in (foreign, old, new):
        path.write_bytes(bytes(5000))
    os.utime(old, (time.time() - 3600,) * 2)
    for name in NAMES[:5]:
        limited.write(name, entry(name))
    assert foreign.exists() and new.exists() and not old.exists(), "one was left by a crash"


def test_space_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = store(tmp_path, min_free=5000)
    free = 9000
    disk = lambda path: SimpleNamespace(free=free - sum(f.stat().st_size for f in files(tmp_path)), total=10_000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", disk)
    for name in NAMES:
        limited.write(name, entry(name))
    assert limited.contains(NAMES) == [False] * 5 + [True] * 3, "others gave way"
    for free in (5000, 6000, 0):  # noqa: B007 (the disk reads it)
        with pytest.raises(OSError, match="would stay free"):
            limited.write("z" * 65, entry("z" * 65))
    assert limited.contains(NAMES) == [False] * 5 + [True] * 3, "another program has filled the disk: nothing goes"
    free = 8600
    limited.write("z" * 65, entry("z" * 65))
    assert limited.contains([*NAMES[-3:], "z" * 65]) == [True, True, False, True], (
        "it needs a little, for which the oldest goes"
    )


@pytest.mark.parametrize("what", ["its limit", "a full disk"])
def test_work_for_an_entry_does_not_grow_with_the_directory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 100 + HEADER_BYTES, 200
    options = {"max_bytes": count * size, "keep_ratio": 1.0} if what == "its limit" else {"min_free": 5000}
    limited, held, scans = store(tmp_path, **options), [0], [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000 + count * size - held[0]))
    scan, unlink = os.scandir, os.unlink

    def counted(path: Any) -> Any:
        scans[0] += 1
        return scan(path)

    def removed(path: Any) -> None:
        held[0] -= os.stat(path).st_size
        unlink(path)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.setattr(os, "unlink", removed)
    for number in range(5 * count):
        limited.write(f"{number:065d}", entry(NAMES[0], 100))
        held[0] += size
    there = limited.contains([f"{number:065d}" for number in range(5 * count)])
    assert there == [False] * (4 * count) + [True] * count
    assert scans[0] <= 7 * 2, "once for each directory that was written anew: two folders"


def test_ranks_keep_one_limit(tmp_path: Path) -> None:
    """Whoever writes: the limit is of the directory."""
    size = 1000 + HEADER_BYTES
    ranks = [store(tmp_path, max_bytes=20 * size) for _ in range(8)]
    for number in range(30):
        for rank, each in enumerate(ranks):
            each.write(f"{number:032d}{rank:033d}", entry(NAMES[0]))
            assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * size
    assert len(files(tmp_path)) >= 17


def test_what_several_ranks_write_is_counted_once(tmp_path: Path) -> None:
    """Ranks with equal caches write the same entries at once: each has seen that none was there."""
    size, count = 1000 + HEADER_BYTES, 100
    ranks = [store(tmp_path, max_bytes=count * size) for _ in range(8)]
    for number in range(3 * count):
        for rank in ranks:
            rank.write(f"{number:065d}", entry(NAMES[0]))
        if number >= count:
            assert len(files(tmp_path)) >= 0.9 * count - 1, "what an eviction leaves"
    assert counted(tmp_path) == sum(path.stat().st_size for path in files(tmp_path))


def test_what_is_deleted_is_not_counted(tmp_path: Path) -> None:
    limited = store(tmp_path, max_bytes=100_000)
    limited.write(NAMES[0], entry(NAMES[0]))
    limited.write(NAMES[1], entry(NAMES[1]))
    limited.delete(NAMES[0])
    limited.delete(NAMES[0])
    assert counted(tmp_path) == 1000 + HEADER_BYTES


def test_a_write_that_fails_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = store(tmp_path, max_bytes=3 * (1000 + HEADER_BYTES), keep_ratio=1.0)
    limited.write(NAMES[0], entry(NAMES[0]))

    def fails(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        for name in NAMES[1:]:
            with pytest.raises(OSError, match="full"):
                limited.write(name, entry(name))
    limited.write(NAMES[1], entry(NAMES[1]))
    limited.write(NAMES[2], entry(NAMES[2]))
    assert limited.contains(NAMES[:3]) == [True] * 3


def test_names_of_temporary_files_do_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two containers that share a directory the processes have the same numbers."""
    seen, replace = list[str](), os.replace

    def noted(source: Path, target: Path) -> None:
        seen.append(str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(2):
        store(tmp_path).write(NAMES[0], entry(NAMES[0]))
    assert len(set(seen)) == 2


def test_a_count_that_makes_no_sense_is_made_anew(tmp_path: Path) -> None:
    limited = store(tmp_path, max_bytes=3 * (1000 + HEADER_BYTES))
    limited.write(NAMES[0], entry(NAMES[0]))
    (total,) = (tmp_path / "files").glob(".total-*")
    total.write_bytes(b"none")
    for name in NAMES[1:]:
        limited.write(name, entry(name))
    assert len(files(tmp_path)) <= 3


KILLED = """
import sys
from pathlib import Path
from sglang.srt.mem_cache.storage.entry import new_entry, seal
from sglang.srt.mem_cache.storage.file_store import FileStore
store = FileStore(Path(sys.argv[1]), min_free=0)
for i in range(10**6):
    name = f"{i:065d}"
    data = new_entry(1 << 20)
    seal(name, data)
    store.write(name, data)
    print(i, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_entries(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "files")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        for _ in range(20):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    after = store(tmp_path)
    names = [path.name for path in files(tmp_path) if not path.name.startswith(".tmp-")]
    assert len(names) >= 20
    for name in names:
        data = after.read(name)
        assert data is not None and problem(name, data, 1 << 20) is None


# --- flags ------------------------------------------------------------------------------------------------------------


def test_settings_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "one"))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "64Gi")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE", "1.5G")
    made = FileStore.from_options({})
    assert (made.directory, made.space.max_bytes, made.space.min_free) == (tmp_path / "one", 64 << 30, 1_500_000_000)
    assert made.space.keep_ratio == envs.SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO == 0.9
    made = FileStore.from_options({"storage_dir": str(tmp_path / "two"), "max_size": 0, "eviction_ratio": 0.5})
    assert (made.directory, made.space.max_bytes, made.space.keep_ratio) == (tmp_path / "two", None, 0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_size": "much"}, "max_size: expected a size"),
        ({"eviction_ratio": 2}, "eviction_ratio must be in"),
        ({"size": 5}, "size means nothing to the backend file"),
        ({"storage_dir": "/proc/nothing"}, "cannot be used.*STORAGE_DIR"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        FileStore.from_options(options)


class Memory:
    """A store of another package: a dictionary."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.entries = options, dict[str, bytes]()

    def contains(self, names: Sequence[str]) -> list[bool]:
        return [name in self.entries for name in names]

    def read(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def write(self, name: str, data: bytearray) -> None:
        self.entries[name] = bytes(data)

    def delete(self, name: str) -> None:
        self.entries.pop(name, None)


class Broken(Memory):
    def __init__(self, options: dict[str, Any]) -> None:
        raise ConnectionRefusedError("nobody answers")


OPENS = threading.Event()


class Hangs(Memory):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        assert OPENS.wait(60)


class NotAStore:
    def get(self, key: str) -> None: ...


def dynamic(class_name: str, **more: Any) -> Any:
    extra = {"module_path": __name__, "class_name": class_name, **more}
    config = read_storage_config("dynamic", "timeout", str(extra).replace("'", '"'))
    assert config is not None
    return create_store(config)


def test_a_store_of_another_package() -> None:
    made = dynamic("Memory", address="10.0.0.1", prefetch_threshold=64)
    assert isinstance(made, Memory) and made.options == {"address": "10.0.0.1"}


@pytest.mark.parametrize(
    ("class_name", "text"),
    [
        ("NotAStore", "has no contains, read, write, delete"),
        ("Nothing", "cannot be imported"),
        ("Broken", "cannot be created: ConnectionRefusedError"),
    ],
)
def test_what_is_no_store(class_name: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        dynamic(class_name)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("{", "cannot be parsed"),
        ("[1]", "takes an object"),
        ('{"prefetch_threshold": "many"}', "prefetch_threshold must be a number"),
        ("@/nowhere.yaml", "cannot be read"),
    ],
)
def test_extra_configurations_that_are_refused(extra: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        read_storage_config("file", "timeout", extra)


def test_extra_configurations(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("prefetch_threshold: 64\nprefetch_timeout_base: 2\nmax_size: 5G\n")
    config = read_storage_config("file", "timeout", f"@{path}")
    assert config is not None and config.prefetch_threshold == 64 and config.options == {"max_size": "5G"}
    assert config.timeout(2048) == 2.5
    assert read_storage_config(None, "timeout", None) is None


# --- jobs -------------------------------------------------------------------------------------------------------------


class Pages:
    """Main memory with pools of tokens, of a window and of states, and a store."""

    def __init__(
        self,
        made: Any,
        widths: Sequence[int] = (40, 24, 1000),
        fingerprint: bytes = b"one",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        pools = [
            SimpleNamespace(page_bytes=width, host=torch.zeros((30, width), dtype=torch.uint8)) for width in widths
        ]
        self.pools, windows = pools, min(1, len(widths) - 1)
        self.engine = StorageEngine(made, pools, fingerprint, PAGE, windows, share)

    def fill(self) -> None:
        for seed, pool in enumerate(self.pools):
            pool.host.random_(0, 256, generator=torch.Generator().manual_seed(seed))

    def run(self, job: StorageJob) -> Any:
        self.engine.submit(job)
        deadline = time.monotonic() + 300
        while job.state is CopyState.UNDER_WAY:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return job

    def pages(self, keys: np.ndarray, first: int = 1) -> PrefixPages:
        count = len(keys) // PAGE
        window = [np.arange(20, 23)] if len(self.pools) > 1 else []
        return PrefixPages(keys, None, np.arange(first, first + count), window, 7 * (len(self.pools) > 2))

    def write(self, keys: np.ndarray) -> Write:
        has_end = len(self.pools) > 1
        return self.run(Write(keys, None, pages=self.pages(keys), has_end=has_end))

    def look_up(self, keys: np.ndarray, namespace: str | None = None, least: int = 0) -> int:
        return self.run(Lookup(keys, namespace, least=least)).end

    def read(self, keys: np.ndarray) -> int:
        return self.run(Read(keys, None, pages=self.pages(keys))).end


KEYS = np.random.default_rng(3).integers(0, 50_000, TOKENS)


@pytest.mark.parametrize("widths", [(40,), (40, 24), (40, 24, 1000)])
def test_pages_return_as_they_were(tmp_path: Path, widths: Sequence[int]) -> None:
    before = Pages(store(tmp_path), widths)
    before.fill()
    end = TOKENS if len(widths) > 1 else 192
    assert before.write(KEYS).num_tokens == end and before.write(KEYS).num_tokens == 0, "once"
    after = Pages(store(tmp_path), widths)
    longer = np.concatenate((KEYS, KEYS))
    assert after.look_up(longer) == after.look_up(KEYS) == end
    assert after.look_up(KEYS, least=end) == 0 and after.look_up(KEYS, namespace="salt") == 0
    assert after.read(KEYS[:end]) == end
    pages = after.pages(KEYS[:end])
    for part, old, new in zip([pages.tokens, *pages.windows], before.pools, after.pools, strict=False):
        assert torch.equal(old.host[part - 1], new.host[part - 1])
    if len(widths) == 3:
        assert torch.equal(before.pools[2].host[6], after.pools[2].host[6])
    untouched = torch.ones(30, dtype=torch.bool)
    untouched[pages.tokens - 1] = False
    assert not after.pools[0].host[untouched].any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_with_equal_caches_write_each_entry_once(count: int, tmp_path: Path) -> None:
    written: list[str] = []

    class Counting:
        """A store that notes what is written, by whichever rank."""

        def __init__(self) -> None:
            self.made = store(tmp_path)

        def write(self, name: str, data: Any) -> None:
            written.append(name)
            self.made.write(name, data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.made, name)

    ranks = [Pages(Counting(), share=(rank, count)) for rank in range(count)]
    for rank in ranks:
        rank.fill()
    results = [rank.write(KEYS) for rank in ranks]
    assert len(written) == len(set(written)) == -(-TOKENS // ranks[0].engine.block)
    assert results[0].num_tokens == TOKENS and results[0].num_bytes > 0
    after = Pages(store(tmp_path))
    assert after.look_up(KEYS) == after.read(KEYS) == TOKENS


def test_pages_that_main_memory_has_are_left(tmp_path: Path) -> None:
    Pages(store(tmp_path)).write(KEYS)
    after = Pages(store(tmp_path))
    after.fill()
    kept = [pool.host.clone() for pool in after.pools]
    pages = after.pages(KEYS)
    pages.tokens[:5] = 0
    assert after.run(Read(KEYS, None, pages=pages, start=5 * PAGE)).end == TOKENS
    assert torch.equal(after.pools[0].host[:5], kept[0][:5]) and not after.pools[0].host[5:13].any()


def test_other_servers_have_other_entries(tmp_path: Path) -> None:
    Pages(store(tmp_path)).write(KEYS)
    assert Pages(store(tmp_path), fingerprint=b"two").look_up(KEYS) == 0


DAMAGE: dict[str, Callable[[bytearray], object]] = {
    "cut off": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "empty": lambda data: data.clear(),
    "longer": lambda data: data.extend(b"more"),
    **{f"bit of byte {i}": (lambda data, i=i: data.__setitem__(i, data[i] ^ 4)) for i in (0, 7, 20, 75, 82, 90, -1)},
    "another entry": lambda data: data.__setitem__(slice(None), entry(NAMES[0], len(data) - HEADER_BYTES)),
    "another format": lambda data: data.__setitem__(slice(8), b"SM120KV1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_entries_are_misses_and_go(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Pages(store(tmp_path))
    before.fill()
    before.write(KEYS)
    second = PrefixNames(b"one", KEYS, None, block_tokens(PAGE)).block(1)
    for name in (second, PrefixNames(b"one", KEYS, None, block_tokens(PAGE)).block(2)):
        (path,) = (tmp_path / "files").rglob(name)
        data = bytearray(path.read_bytes())
        DAMAGE[damage](data)
        path.write_bytes(data)
    after = Pages(store(tmp_path))
    assert after.look_up(KEYS) == TOKENS
    assert after.read(KEYS) == 64, "one block"
    assert not list((tmp_path / "files").rglob(second)) and after.look_up(KEYS) == 0
    assert after.read(KEYS) == 64 and after.engine.num_corrupt == 1
    assert sum("is removed" in record.message for record in caplog.records) == 1
    assert before.write(KEYS).num_tokens == 64 and after.read(KEYS) == 128, "the third block is bad, too"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_is_left_alone(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(store(tmp_path))
    pages.write(KEYS[:128])
    number = [0]

    def fails(source: object, target: object) -> None:
        number[0] += 1
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", fails)
    assert pages.engine.writes
    for _ in range(3):
        assert pages.write(KEYS).state is CopyState.FAILED
    assert number == [1] and not pages.engine.writes
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    assert pages.read(KEYS[:128]) == 128, "reading goes on"
    assert all(not path.name.startswith(".tmp-") for path in files(tmp_path))
    pages.engine._off_until["written"] = 0.0
    monkeypatch.undo()
    assert pages.write(KEYS).state is CopyState.DONE and pages.engine.writes


def test_a_store_that_does_not_answer_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory({})
    pages = Pages(memory)
    pages.write(KEYS)
    memory.contains = lambda names: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert pages.look_up(KEYS) == 0 and pages.look_up(KEYS) == 0
    assert pages.engine.num_failures == 1
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "a link to another entry": lambda path: path.symlink_to(path.with_name("copy")),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_a_miss(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    pages = Pages(FileStore(Path("f"), min_free=0))
    pages.write(KEYS)
    (path,) = Path("f").rglob(PrefixNames(b"one", KEYS, None, block_tokens(PAGE)).block(0))
    path.rename(path.with_name("copy"))
    NO_FILES[what](path)
    assert pages.read(KEYS) == 0 and pages.engine.num_corrupt == 1 and pages.engine.num_failures == 0
    assert what == "a directory" or not os.path.lexists(path)


def test_a_store_that_does_not_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "OPEN_LIMIT_S", 0.05)
    with pytest.raises(UserError, match="has not opened within 0.05 s"):
        dynamic("Hangs")
    OPENS.set()


def test_a_removal_leaves_nothing_of_a_prefix(tmp_path: Path) -> None:
    pages = Pages(store(tmp_path))
    pages.write(KEYS)
    assert pages.run(Removal(KEYS, None)).state is CopyState.DONE
    assert files(tmp_path) == []


def test_what_cannot_be_removed_is_not_read(tmp_path: Path) -> None:
    memory = Memory({})
    pages = Pages(memory)
    pages.write(KEYS)
    memory.delete = lambda name: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    assert pages.run(Removal(KEYS, None)).state is CopyState.FAILED
    assert pages.look_up(KEYS) == 0 and pages.read(KEYS) == 0


def test_names_depend_on_everything_before() -> None:
    block = block_tokens(PAGE)
    names = PrefixNames(b"one", KEYS, None, block)
    changed = KEYS.copy()
    changed[0] += 1
    others = [
        PrefixNames(b"two", KEYS, None, block),
        PrefixNames(b"one", KEYS, "", block),
        PrefixNames(b"one", KEYS, "salt", block),
        PrefixNames(b"one", changed, None, block),
    ]
    made = [n.block(2) for n in (names, *others)] + [n.end(TOKENS) for n in (names, *others)] + [names.end(192)]
    assert len(set(made)) == len(made) and all(len(name) == 65 for name in made)
    assert PrefixNames(b"one", KEYS[:128], None, block).block(1) == names.block(1)
