"""Files that take long are handed out first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from order import HERE, SECONDS, long_files_first


def test_the_files_of_the_table_exist() -> None:
    assert [name for name in SECONDS if not (HERE / name).exists()] == []


def test_long_files_come_first_and_the_rest_stays_in_order() -> None:
    longest = max(SECONDS, key=lambda name: SECONDS[name])
    second = next(name for name in SECONDS if SECONDS[name] < SECONDS[longest])
    names = ["test_names.py", second, "test_order.py", longest]
    items: Any = [SimpleNamespace(path=Path(HERE / name), name=i) for name in names for i in range(2)]
    long_files_first(items)
    files = [str(item.path.relative_to(HERE)) for item in items]
    assert files[::2] == files[1::2] == [longest, second, "test_names.py", "test_order.py"]
    assert [item.name for item in items] == [0, 1] * 4


def test_make_hands_files_out_in_that_order() -> None:
    assert "--dist loadfile --no-loadscope-reorder" in (HERE.parent / "Makefile").read_text()
