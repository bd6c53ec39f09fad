"""Checks the token ids of prompts, of which clients send millions, while the event loop goes on."""

from __future__ import annotations

import asyncio

import numpy as np

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.wire.token_ids import Ids

IDS_AT_ONCE = 1 << 15
"""Ids of a list that are checked and converted, in about three milliseconds, before other callbacks get to run."""


async def checked_ids(ids: list[int] | Ids, vocab_size: int, source: str) -> Ids:
    """Returns token ids, of which there is at least one, as an array. source: what holds them, for the error. Raises
    RequestError."""
    if isinstance(ids, np.ndarray):
        _refuse_foreign(int(ids.min()), int(ids.max()), vocab_size, source)
        return ids
    checked = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        piece = ids[start : start + IDS_AT_ONCE]
        if set(map(type, piece)) != {int}:
            raise RequestError("input_ids must be integers.")
        _refuse_foreign(min(piece), max(piece), vocab_size, source)
        checked[start : start + len(piece)] = piece
    return checked


def _refuse_foreign(lowest: int, highest: int, vocab_size: int, source: str) -> None:
    """Raises RequestError if one of these ids is not in the vocabulary."""
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(f"{source} must hold token ids in [0, {vocab_size - 1}], got {bad}.")
