"""How many entries a look-up asks a store for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.mem_cache.storage import engine
from sglang.srt.mem_cache.storage.engine import Lookup, StorageEngine
from sglang.srt.mem_cache.storage.prefix_names import PrefixNames

BLOCK, BLOCKS = 64, 50


@pytest.mark.parametrize(("end", "found"), [(BLOCK * (BLOCKS - 3), True), (BLOCK * 3, False), (None, False)])
def test_the_search_for_an_end_has_a_limit(monkeypatch: pytest.MonkeyPatch, end: int | None, found: bool) -> None:
    monkeypatch.setattr(engine, "MAX_ENDS_ASKED", 10 * BLOCK)
    keys = np.arange(BLOCK * BLOCKS, dtype=np.int64)
    names = PrefixNames(b"one", keys, None, BLOCK)
    stored = None if end is None else names.end(end)
    asked: list[str] = []

    def contains(wanted: Sequence[str]) -> list[bool]:
        asked.extend(wanted)
        return [name == stored for name in wanted]

    def ask(kind: str, call: Callable[[], Any]) -> Any:
        return call()

    with_store: Any = SimpleNamespace(block=BLOCK, page_size=1, store=SimpleNamespace(contains=contains), _ask=ask)
    job = Lookup(keys=keys, namespace=None)
    assert StorageEngine._deepest_end(with_store, job, names, BLOCKS) == (end if found else 0)
    assert len(asked) <= 10 * BLOCK
