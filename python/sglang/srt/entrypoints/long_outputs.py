"""Writes large outputs in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.sampling.hidden_states import VALUE_BYTES

T = TypeVar("T")

LONG_OUTPUT = 1 << 14
"""Characters, log probabilities or numbers of hidden states that take about 20 ms to parse and to write."""
BYTES_COPIED = 64
"""Bytes of JSON that is there already, which are copied in the time in which a character is parsed and written."""
FEW_OUTPUTS = 16


def copied(num_bytes: int) -> int:
    """Returns the characters that take as long to parse and to write as it takes to copy these bytes of JSON."""
    return num_bytes // BYTES_COPIED


def is_long(output: GenerateOutput) -> bool:
    """Returns whether writing an output would block the event loop noticeably."""
    return length_of(output) > LONG_OUTPUT


def length_of(output: GenerateOutput) -> int:
    """Returns the characters that take as long to write as the output."""
    num_logprobs = 0 if output.logprobs is None else output.logprobs.num_values
    return len(output.text) + num_logprobs + len(output.hidden) // VALUE_BYTES


async def written(outputs: Sequence[GenerateOutput], write: Callable[[], T], num_more: int = 0) -> T:
    """Returns the result of `write()` for all outputs of a call, computed in a thread if they are long. num_more:
    characters that it writes besides them."""
    is_quick = len(outputs) <= FEW_OUTPUTS and sum(map(length_of, outputs)) + num_more <= LONG_OUTPUT
    return write() if is_quick else await in_thread(write)


async def in_thread(work: Callable[[], T]) -> T:
    """Returns the result of `work()`, computed in a thread. When cancelled, waits for the thread, which still uses what
    the caller would release."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
