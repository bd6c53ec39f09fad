"""Directories that others may change: refused where somebody has laid them, otherwise with a key for the entries."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from srt.mem_cache.storage.test_file_store import KEYS, NAMES, Pages, entry

from sglang.srt.errors import UserError
from sglang.srt.mem_cache.storage import directory as directories
from sglang.srt.mem_cache.storage.directory import KEY_BYTES, is_writable_by_others, steps_to, user_key
from sglang.srt.mem_cache.storage.entry import HEADER_BYTES, problem, seal
from sglang.srt.mem_cache.storage.file_store import FileStore

SOMEBODY = 4_000_000_000


def give_away(patch: pytest.MonkeyPatch, *paths: Path) -> None:
    """These are somebody else's, and everything else of this user."""

    def lstat(path: Path) -> Any:
        status = path.lstat()
        return SimpleNamespace(st_mode=status.st_mode, st_uid=SOMEBODY if path in paths else os.getuid())

    patch.setattr(directories, "lstat", lstat)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of all, as /tmp is one."""
    give_away(monkeypatch)
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"another user.*SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        FileStore(path, min_free=0)


def test_a_directory_of_ones_own(temporary: Path) -> None:
    made = FileStore(temporary / "new" / "files", min_free=0)
    assert made.key == b"" and not list(made.directory.iterdir())


def test_what_another_user_laid_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """His directory, one below it, his link to a directory of ours, and ours to his link."""
    ours, his, link = temporary / "ours", temporary / "his", temporary / "link"
    for path in (ours, his, his / "below"):
        path.mkdir(mode=0o700)
    link.symlink_to(ours)
    (ours / "chain").symlink_to(link)
    give_away(monkeypatch, his, link)
    for path in (his, his / "below", link, link / "below", ours / "chain", ours / ".." / "link"):
        refused(path)
    FileStore(ours, min_free=0)


def test_a_link_of_ones_own_is_followed(temporary: Path) -> None:
    (temporary / "ours").mkdir(mode=0o700)
    (temporary / "link").symlink_to("ours")
    assert not is_writable_by_others(temporary / "link")
    (temporary / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        list(steps_to(temporary / "round"))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_where_others_may_write_entries_have_a_key(mode: int, temporary: Path) -> None:
    path = temporary / "shared"
    path.mkdir()
    path.chmod(mode)
    made = FileStore(path, min_free=0)
    (file,) = path.iterdir()
    assert len(made.key) == KEY_BYTES and file.stat().st_mode & 0o777 == 0o600
    assert FileStore(path, min_free=0).key == made.key, "of all servers of the user"
    below = FileStore(path / "below", min_free=0)
    assert bool(below.key) is (mode != 0o1777), "who may exchange the directory may write in it"


def test_a_directory_of_another_user_that_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team's, where nobody else could have laid it."""
    team = tmp_path / "team"
    team.mkdir(mode=0o700)
    give_away(monkeypatch, team)
    assert FileStore(team, min_free=0).key


@pytest.mark.parametrize("what", ["read by others", "linked", "a link", "a pipe", "short"])
def test_a_key_that_others_have_laid_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_KEY_POLL_S", 0.0)
    path, other = tmp_path / f".key-{os.getuid()}", tmp_path / "other"
    other.write_bytes(bytes(KEY_BYTES))
    other.chmod(0o600)
    if what == "a link":
        path.symlink_to(other)
    elif what == "a pipe":
        os.mkfifo(path, 0o600)
    elif what == "linked":
        os.link(other, path)
    else:
        path.write_bytes(bytes(KEY_BYTES if what != "short" else 5))
        path.chmod(0o644 if what == "read by others" else 0o600)
    with pytest.raises((UserError, OSError), match=r"remove it|symbolic"):
        user_key(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    made = FileStore(tmp_path / "files", min_free=0)
    (tmp_path / "elsewhere").mkdir()
    (made.directory / "aa").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        made.write(NAMES[0], entry(NAMES[0]))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_entry_under_another_key_is_none() -> None:
    data = entry(NAMES[0])
    seal(NAMES[0], data, b"ours")
    assert problem(NAMES[0], data, 1000, b"ours") is None
    for key in (b"", b"his"):
        assert problem(NAMES[0], data, 1000, key) == "has a wrong digest"
        forged = entry(NAMES[0])
        seal(NAMES[0], forged, key)
        assert problem(NAMES[0], forged, 1000, b"ours") == "has a wrong digest"
    data[HEADER_BYTES + 5] ^= 1
    assert problem(NAMES[0], data, 1000, b"ours") == "has a wrong digest"


def test_users_of_one_directory_leave_each_other_alone(tmp_path: Path) -> None:
    ours, his = (FileStore(tmp_path / "files", min_free=0) for _ in range(2))
    ours.key, his.key = b"ours", b"his"
    ours_pages, his_pages = Pages(ours), Pages(his)
    ours_pages.write(KEYS)
    assert his_pages.look_up(KEYS) == 0
    his_pages.write(KEYS + np.int64(0))
    assert ours_pages.read(KEYS) == len(KEYS) and his_pages.engine.num_corrupt == 0
