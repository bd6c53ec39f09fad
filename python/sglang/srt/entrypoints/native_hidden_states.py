"""`meta_info.hidden_states` of `/generate` as JSON, in pieces: millions of numbers must not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response

from sglang.srt.entrypoints.long_json import LongJSON

Result = dict[str, Any]
Results = TypeVar("Results", Result, list[Result], Result | list[Result])

_VALUES_AT_ONCE = 1 << 16
"""Numbers that are written before other callbacks may run: a few milliseconds."""


async def response_with_hidden_states(work: Awaitable[Results]) -> Response:
    """Returns the response with the results of `work`, which may have hidden states."""
    results, long = await work, LongJSON()
    every = results if isinstance(results, list) else [results]
    for result in every:
        pieces = await _pieces(result)
        if pieces is not None:
            result["meta_info"]["hidden_states"] = long.part(pieces)
    return await asyncio.to_thread(long.response, results) if any(map(has_logprobs, every)) else long.response(results)


def has_logprobs(result: Result) -> bool:
    """Returns whether a result has log probabilities, which may take long to write as JSON."""
    return "output_token_logprobs" in result["meta_info"]


async def stream_with_json(results: AsyncGenerator[Result, None]) -> AsyncGenerator[Result, None]:
    """Yields the dicts of a stream, with hidden states in a form that JSON can contain."""
    async with aclosing(results):
        async for result in results:
            pieces = await _pieces(result)
            if pieces is not None:
                result["meta_info"]["hidden_states"] = msgspec.Raw(b"".join(pieces))
            yield result


async def _pieces(result: Result) -> list[bytes] | None:
    """Returns the JSON of a result's hidden states; None if it has none."""
    states: list[np.ndarray] | None = result["meta_info"].get("hidden_states")
    if states is None:
        return None
    pieces = [b"["]
    for number, entry in enumerate(states):
        rows = await _rows(entry if entry.ndim == 2 else entry[None])
        inside = [b"[", *rows, b"]"] if entry.ndim == 2 else rows
        pieces += [b",", *inside] if number else inside
    return [*pieces, b"]"]


async def _rows(rows: np.ndarray) -> list[bytes]:
    """Returns pieces of JSON that are, together, rows [N, H] as N lists separated by commas."""
    pieces: list[bytes] = []
    step = max(1, _VALUES_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        if pieces:
            pieces.append(b",")
        pieces.append(msgspec.json.encode(rows[first : first + step].tolist())[1:-1])
        await asyncio.sleep(0)
    return pieces
