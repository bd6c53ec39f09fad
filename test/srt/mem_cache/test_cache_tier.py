"""Behind which depth a request goes on that finds parts of its prefix in two memories."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.mem_cache.cache_tier import CachedPrefix, resumable_end

WINDOW = 4


def prefix(windows: list[list[int]]) -> CachedPrefix:
    """Nodes of four tokens each, with these slots of the one window; 0: gone."""
    nodes: list[Any] = [
        SimpleNamespace(depth=4 * i + 4, key=np.zeros(4), windows=[np.array(slots)], checkpoint=0)
        for i, slots in enumerate(windows)
    ]
    window = SimpleNamespace(index=0, window=WINDOW, seen_before=lambda at: np.minimum(at, WINDOW - 1))
    tier: Any = SimpleNamespace(windows=(window,), checkpoints=None)
    return CachedPrefix(tier, nodes)


@pytest.mark.parametrize(
    ("one", "other", "end"),
    [
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [], 8),
        ([[1, 2, 3, 4], [0, 6, 7, 8]], [], 8),  # the last three tokens are seen
        ([[1, 2, 3, 4], [5, 6, 0, 8]], [], 4),
        ([[1, 2, 3, 4], [5, 6, 0, 8]], [[0, 0, 0, 0], [0, 0, 9, 0]], 8),
        ([[1, 0, 3, 4], [5, 6, 0, 8]], [[0, 0, 0, 0], [9, 9, 0, 9]], 0),
    ],
)
def test_windows_are_whole_where_a_request_goes_on(one: list[list[int]], other: list[list[int]], end: int) -> None:
    assert resumable_end(prefix(one), prefix(other), 0) == end
    assert resumable_end(prefix(other), prefix(one), 0) == end
    assert resumable_end(prefix(one), prefix(other), end) == 0


def test_a_long_prefix_without_windows_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each node at which it might go on."""
    reads = list[int]()
    window = CachedPrefix.window
    monkeypatch.setattr(CachedPrefix, "window", lambda *args: (reads.append(1), window(*args))[1])
    assert resumable_end(prefix([[0, 0, 0, 0]] * 100), prefix([[0, 0, 0, 0]] * 100), 0) == 0
    assert len(reads) == 2
