from __future__ import annotations

import asyncio
import threading

import pytest

from sglang.srt.entrypoints.long_outputs import FEW_OUTPUTS, LONG_OUTPUT, in_thread, is_long, written
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs


def values(count: int, num_top: int, num_named: int, of: str) -> OutputLogprobs:
    """Of `count` tokens."""
    logprobs = OutputLogprobs(num_top, bytes(4 * num_named), first_token=5 if of == "input" else None)
    logprobs.output += bytes(4 * count * (2 + 2 * num_top + num_named))
    if of == "input":
        logprobs.input, logprobs.output = logprobs.output, logprobs.input
    return logprobs


def output(text: str = "", logprobs: OutputLogprobs | None = None, num_states: int = 0) -> GenerateOutput:
    return GenerateOutput(0, text, [], None, TokenMeta(1, 1), logprobs, bytes(4 * num_states))


@pytest.mark.parametrize(
    ("each", "long"),
    [
        (output(), False),
        (output("a" * LONG_OUTPUT), False),
        (output("ab" * LONG_OUTPUT), True),
        (output(logprobs=values(LONG_OUTPUT, 0, 0, "output")), False),
        (output(logprobs=values(LONG_OUTPUT // 2, 2, 0, "output")), True),
        (output(logprobs=values(LONG_OUTPUT // 2, 0, 2, "output")), True),
        (output(logprobs=values(LONG_OUTPUT, 0, 0, "input")), True),
        (output(num_states=LONG_OUTPUT), False),
        (output(num_states=LONG_OUTPUT + 1), True),
    ],
)
def test_long_outputs_and_many_are_written_in_a_thread(each: GenerateOutput, long: bool) -> None:
    assert is_long(each) is long

    def off_event_loop(num: int, num_more: int = 0) -> bool:
        thread = asyncio.run(written([each] * num, threading.current_thread, num_more))
        return thread is not threading.main_thread()

    assert off_event_loop(1) is long and off_event_loop(FEW_OUTPUTS + 1)
    assert off_event_loop(1, LONG_OUTPUT + 1)


@pytest.mark.parametrize("long", [False, True])
def test_outputs_are_long_together(long: bool) -> None:
    half = output("a" * (LONG_OUTPUT // 2)), output(logprobs=values(LONG_OUTPUT // 2, 0, 0, "output"))

    def off_event_loop(num_more: int) -> bool:
        thread = asyncio.run(written(half, threading.current_thread, num_more))
        return thread is not threading.main_thread()

    assert off_event_loop(int(long)) is long


def test_a_thread_ends_before_its_caller_is_cancelled() -> None:
    """Until then it uses what the caller would release."""
    begun, may_end, events = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        may_end.wait(300)
        events.append("thread")

    async def caller() -> None:
        try:
            await in_thread(work)
        finally:
            events.append("caller")

    async def main() -> None:
        task = asyncio.ensure_future(caller())
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        for _ in range(10):  # turns, in which a caller that does not wait would end
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
    assert events == ["thread", "caller"]
