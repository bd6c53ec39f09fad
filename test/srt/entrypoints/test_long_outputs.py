from __future__ import annotations

import asyncio
import threading

import pytest

from sglang.srt.entrypoints.long_outputs import FEW_OUTPUTS, LONG_OUTPUT, has_many_logprobs, is_long, written
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs

ROW = [(-0.5, 1)] * (LONG_OUTPUT // 2)


def output(text: str = "", logprobs: OutputLogprobs | None = None) -> GenerateOutput:
    return GenerateOutput(0, text, [], None, TokenMeta(1, 1), logprobs)


@pytest.mark.parametrize(
    ("each", "long"),
    [
        (output(), False),
        (output("a" * LONG_OUTPUT), False),
        (output("ab" * LONG_OUTPUT), True),
        (output(logprobs=OutputLogprobs(ROW)), False),
        (output(logprobs=OutputLogprobs(ROW, [ROW, ROW])), True),
        (output(logprobs=OutputLogprobs(output_token_ids=[ROW, ROW, [(-0.5, 1)]])), True),
        (output(logprobs=OutputLogprobs(input=[(None, 1)], input_top=[None, ROW, ROW])), True),
        (output(logprobs=OutputLogprobs(input=[(None, 1)], input_token_ids=[None, ROW, ROW])), True),
    ],
)
def test_long_outputs_and_many_are_written_in_a_thread(each: GenerateOutput, long: bool) -> None:
    assert is_long(each) is long and has_many_logprobs(each) is (long and not each.text)

    def off_event_loop(num: int, num_more: int = 0) -> bool:
        thread = asyncio.run(written([each] * num, threading.current_thread, num_more))
        return thread is not threading.main_thread()

    assert off_event_loop(1) is long and off_event_loop(FEW_OUTPUTS + 1)
    assert off_event_loop(1, LONG_OUTPUT + 1) and off_event_loop(1, LONG_OUTPUT) is long
