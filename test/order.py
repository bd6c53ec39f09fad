"""The order of the files: those that take long first, so that no worker of xdist is alone with one at the end.

`make test` hands out whole files, in the order of collection (`--dist loadfile --no-loadscope-reorder`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

SECONDS = {}
"""Of one processor, about, by path below test/: files of 20 or more, when they were last measured."""


def long_files_first(items: list[pytest.Item]) -> None:
    """Sorts in place. Files that are not in the table follow in the order that they have, as do tests of a file."""
    seconds = {str(HERE / name): number for name, number in SECONDS.items()}
    items.sort(key=lambda item: -seconds.get(str(item.path), 0))
