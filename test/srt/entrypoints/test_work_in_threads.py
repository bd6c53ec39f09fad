"""Long answers are parsed, and long conversations that are stored are decoded, while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.anthropic import serving_messages
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT
from sglang.srt.entrypoints.openai.protocol import ParseCallsRequest
from sglang.srt.entrypoints.output_formats import parse_calls
from sglang.srt.entrypoints.responses import serving_responses
from sglang.srt.entrypoints.responses.response_store import ResponseStore, StoredResponse
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.front.media import expansion
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta


def output(length: int) -> GenerateOutput:
    return GenerateOutput(0, "a" * length, [1], FinishReason("stop"), TokenMeta(1, 1), None)


async def same(*args: Any) -> Any:
    """Waits for a request's work."""
    return await args[-1]


@pytest.mark.parametrize("length", [10, LONG_OUTPUT + 1])
@pytest.mark.parametrize("module", [serving_messages, serving_responses], ids=["messages", "responses"])
def test_a_long_answer_is_parsed_in_a_thread(module: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def parse(*_: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return {} if module is serving_responses else ([], False)

    async def collected(*_: Any) -> tuple[None, tuple[GenerateOutput]]:
        return None, (output(length),)

    async def prepared(*_: Any) -> Any:
        if module is serving_messages:
            return SimpleNamespace(stream=False), None, {}
        head = SimpleNamespace(background=False)
        call = SimpleNamespace(stream=False)
        return SimpleNamespace(head=head, call=call, response=parse, keep=lambda response: None)

    names = {"_prepare_call": prepared, "_new_answer": prepared, "_content_blocks": parse, "collect": collected}
    names |= {"until_disconnect": same, "body_bytes": lambda request: 1, "rid_of": lambda request: "r"}
    for name, stand_in in (names | {"ChoiceOutput": lambda *args: None}).items():
        monkeypatch.setattr(module, name, stand_in, raising=False)
    service: Any = SimpleNamespace(tokenizer=None, model_name="m", report_cached_tokens=False)
    body: Any = SimpleNamespace(model="m", max_tokens=5, stop_sequences=None, hides_thoughts=False)
    request: Any = None
    making = (
        serving_messages.messages(service, body, request)
        if module is serving_messages
        else serving_responses.create(service, ResponseStore(), body, request)
    )
    assert asyncio.run(making).status_code == 200
    assert threads == [length == 10]


class Threads:
    """Counts what it is given to do."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def in_thread(self, size: int, work: Any, *args: Any) -> Any:
        self.sizes.append(size)
        return work(*args)


def test_a_long_conversation_that_is_stored_is_decoded_in_a_thread() -> None:
    threads, store = Threads(), ResponseStore()
    service: Any = SimpleNamespace(manager=SimpleNamespace(text=threads))
    items = [
        {"id": f"item_{number}", "type": "message", "role": "user", "content": "a" * 1000} for number in range(4000)
    ]
    response = msgspec.json.encode({"background": True, "status": "completed", "instructions": "a" * 4_000_000})
    store.put("long", StoredResponse(response, msgspec.json.encode(items), len(items)))
    page = asyncio.run(serving_responses.input_items(service, store, "long", 2, "item_3998", True))
    assert [item["id"] for item in msgspec.json.decode(page.body)["data"]] == ["item_3997", "item_3996"]
    assert asyncio.run(serving_responses.cancel(service, store, "long")).status_code == 200
    assert len(threads.sizes) == 2 and min(threads.sizes) > 4_000_000


def test_the_end_of_a_text_is_parsed_in_a_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may bring the events of the whole text: here a quote never ends, and so holds it."""
    finishing: list[threading.Thread] = []

    def finish(self: OutputParser) -> Any:
        finishing.append(threading.current_thread())
        return ended(self)

    class OneThread:
        async def in_thread(self, size: int, work: Any, *args: Any) -> Any:
            return await asyncio.to_thread(work, *args)

    ended = OutputParser.finish
    monkeypatch.setattr(OutputParser, "finish", finish)
    manager: Any = SimpleNamespace(text=OneThread())
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = '<|tool_call>call:f{a:"x}<tool_call|>' * 100
    body = ParseCallsRequest(text=text, tools=tools, tool_call_parser="gemma4")
    answer = asyncio.run(parse_calls(manager, ModelFormats(), body))
    assert len(answer["calls"]) == 100 and threading.main_thread() not in finishing and finishing


def test_images_of_a_cut_prompt_are_compared_with_the_cut_alone() -> None:
    class Item:
        """Not comparable."""

        def __init__(self, number: int) -> None:
            self.spans = [(4 * number, 4 * number + 2)]

        def __eq__(self, other: object) -> bool:
            raise AssertionError("one item compared with another")

        __hash__ = None  # type: ignore[assignment]

    items: Any = [Item(number) for number in range(1000)]
    assert len(expansion.whole_items(items, 2002)) == 501
