"""Long lists of token ids are checked in pieces, between which the event loop serves others."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.front import checked_ids as module
from sglang.srt.managers.front import request_preparation
from sglang.srt.managers.front.checked_ids import checked_ids
from sglang.srt.managers.front.generate_request import RequestError


class Seen(list[int]):
    """Ids, of which each slice is noted."""

    def __init__(self, ids: Any) -> None:
        super().__init__(ids)
        self.events: list[Any] = []

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        self.events.append(len(piece))
        return piece


@pytest.mark.asyncio
async def test_others_run_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDS_AT_ONCE", 4)
    ids = Seen(range(10))

    async def other() -> None:
        while True:
            await asyncio.sleep(0)
            ids.events.append("other")

    task = asyncio.ensure_future(other())
    await asyncio.sleep(0)
    checked = await checked_ids(ids, 10, "input_ids")
    task.cancel()
    assert checked.dtype == np.int32 and checked.tolist() == [*range(10)]
    assert ids.events == [4, "other", 4, "other", 2]
    assert await checked_ids(checked, 10, "input_ids") is checked


@pytest.mark.asyncio
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("bad", [-1, 10])
async def test_ids_outside_of_the_vocabulary_are_refused(
    as_array: bool, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDS_AT_ONCE", 2)
    ids = [1, 2, 3, bad, 4]
    with pytest.raises(RequestError, match=rf"input_ids must hold token ids in \[0, 9\], got {bad}"):
        await checked_ids(np.array(ids, np.int32) if as_array else ids, 10, "input_ids")


def test_too_many_ids_for_log_probabilities_are_refused_before_each_is_looked_at() -> None:
    class Ids(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError

    assert request_preparation._spread_ids(Ids([1] * 5000), 2) == [[1] * 5000] * 2
