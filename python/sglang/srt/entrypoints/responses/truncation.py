"""`truncation: auto`: drops the oldest messages of conversations that do not fit the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

ROOM_SHARE = 4
"""Divisor of the context that gives the room for an answer without a token limit: a fourth."""


async def fit_context(
    request: ChatCompletionRequest, context_len: int, count: Callable[[ChatCompletionRequest], Awaitable[int]]
) -> None:
    """Drops the fewest first messages of `request` that make it fit, up to a message of the user; instructions stay.

    `count` returns the tokens of a request. If even the last user message alone does not fit, it is left, to be refused
    like any other request that is too long.
    """
    room = context_len // ROOM_SHARE if request.max_tokens is None else request.max_tokens
    limit = context_len - room
    if await count(request) <= limit:
        return
    messages = request.messages
    num_fixed = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i > num_fixed]
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        request.messages = messages[:num_fixed] + messages[starts[middle] :]
        if await count(request) <= limit:
            high = middle
        else:
            low = middle + 1
    if starts:
        request.messages = messages[:num_fixed] + messages[starts[low] :]
