"""`meta_info.hidden_states` of `/generate` as JSON, in pieces: millions of numbers must not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import numpy as np

Result = dict[str, Any]
Results = TypeVar("Results", Result, list[Result], Result | list[Result])

_VALUES_AT_ONCE = 1 << 16
"""Numbers that are written before other callbacks may run: a few milliseconds."""


async def hidden_states_as_json(work: Awaitable[Results]) -> Results:
    """Returns the results of `work`, with hidden states in a form that JSON can contain."""
    results = await work
    for result in results if isinstance(results, list) else [results]:
        await _write(result)
    return results


async def stream_with_json(results: AsyncGenerator[Result, None]) -> AsyncGenerator[Result, None]:
    """Yields the dicts of a stream, with hidden states in a form that JSON can contain."""
    async with aclosing(results):
        async for result in results:
            await _write(result)
            yield result


async def _write(result: Result) -> None:
    states: list[np.ndarray] | None = result["meta_info"].get("hidden_states")
    if states is None:
        return
    entries = [b"[" + await _rows(entry) + b"]" if entry.ndim == 2 else await _rows(entry[None]) for entry in states]
    result["meta_info"]["hidden_states"] = msgspec.Raw(b"[" + b",".join(entries) + b"]")


async def _rows(rows: np.ndarray) -> bytes:
    """Returns rows [N, H] as N JSON lists separated by commas."""
    parts = []
    step = max(1, _VALUES_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        parts.append(msgspec.json.encode(rows[first : first + step].tolist())[1:-1])
        await asyncio.sleep(0)
    return b",".join(parts)
