"""The store of responses, and conversations that are cut to the context, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.responses.conversation import chat_request
from sglang.srt.entrypoints.responses.protocol import ResponsesRequest, read_items
from sglang.srt.entrypoints.responses.response_store import HeldInput, ResponseStore, StoredResponse
from sglang.srt.entrypoints.responses.truncation import fit_context


def test_store_is_bounded_in_number() -> None:
    store = ResponseStore(max_responses=3)
    for number in range(5):
        store.put(str(number), StoredResponse(b"{}"))
    assert len(store) == 3 and store.get("1") is None and store.get("2") is not None


def test_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(max_bytes=100)
    store.put("small", StoredResponse(b"x" * 30, b"y" * 30))
    store.put("large", StoredResponse(b"x" * 101))
    assert store.get("large") is None and store.get("small") is not None
    store.put("small", StoredResponse(b"x" * 60, b""))
    store.put("other", StoredResponse(b"x" * 40, b""))
    assert len(store) == 2
    store.put("third", StoredResponse(b"x", b""))
    assert store.get("small") is None and store.get("other") is not None
    assert store.discard("other") and not store.discard("other")


def test_what_a_task_holds_counts() -> None:
    store = ResponseStore(max_bytes=100, max_entry_bytes=60)
    for name in ("first", "second"):
        store.put(name, StoredResponse(b"x", num_waiting_bytes=50))
    assert len(store) == 1 and store.get("second") is not None
    store.put("second", StoredResponse(b"x" * 61))
    assert len(store) == 0


def test_what_is_dropped_does_not_go_on() -> None:
    async def work() -> None:
        store = ResponseStore()
        task = asyncio.create_task(asyncio.sleep(60))
        store.put("first", StoredResponse(b"{}", task=task))
        assert store.num_running == 1
        assert store.discard("first")
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_what_runs_stays() -> None:
    """However many others are stored, and however large they are."""

    async def work() -> None:
        store = ResponseStore(max_responses=3, max_bytes=100)
        task = asyncio.create_task(asyncio.sleep(60))
        store.put("runs", StoredResponse(b"{}", task=task, num_waiting_bytes=40))
        for number in range(9):
            store.put(str(number), StoredResponse(b"x" * 30))
            assert len(store) <= 3
        await asyncio.sleep(0)
        assert store.get("runs") is not None and not task.cancelled() and store.num_running == 1
        assert store.has_room(StoredResponse(b"x" * 50)) and not store.has_room(StoredResponse(b"x" * 60))
        store.put("runs", StoredResponse(b"{}"))  # it has ended
        for number in range(3):
            store.put(str(number), StoredResponse(b"{}"))
        assert store.get("runs") is None
        task.cancel()

    asyncio.run(work())


def test_what_runs_may_fill_the_store() -> None:
    async def work() -> None:
        store = ResponseStore(max_responses=1)
        task = asyncio.create_task(asyncio.sleep(60))
        store.put("runs", StoredResponse(b"{}", task=task))
        store.put("other", StoredResponse(b"{}"))
        assert store.get("other") is None and store.get("runs") is not None
        assert not store.has_room(StoredResponse(b"{}"))
        task.cancel()

    asyncio.run(work())


def test_what_answers_in_progress_hold_counts_until_it_is_dropped() -> None:
    store = ResponseStore(max_bytes=100)
    stored = HeldInput(b"[1]", 1)
    store.hold(stored)
    gone = HeldInput(b"x" * 50, 1)
    store.hold(gone)
    store.put("ended", StoredResponse(b"x" * 40))
    assert store.get("ended") is not None
    del gone
    assert stored.take_conversation([]) == b"[1]"
    store.put("other", StoredResponse(b"x" * 56))
    assert store.get("ended") is not None and store.get("other") is not None


def test_the_oldest_inputs_go_when_nothing_else_is_left() -> None:
    store = ResponseStore(max_bytes=100)
    store.put("ended", StoredResponse(b"x" * 40))
    held = [HeldInput(b"x" * 40, 1) for _ in range(4)]
    for each in held:
        store.hold(each)
    assert store.get("ended") is None
    assert [each.num_bytes for each in held] == [0, 0, 40, 40]
    held[2].drop()
    store.put("new", StoredResponse(b"x" * 56))
    assert store.get("new") is not None and held[3].num_bytes == 40


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = msgspec.convert({"input": list(items), **fields}, ResponsesRequest)
    return chat_request(body, read_items(body.items())).messages


USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "noon"}]}
THOUGHTS = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]}


def test_items_of_one_turn_are_one_message() -> None:
    system, user, turn, result, last = messages(USER, THOUGHTS, SAID, CALL, RESULT, SAID, instructions="be")
    assert (system["role"], user["content"]) == ("system", "a")
    assert turn["reasoning_content"] == "hm" and turn["content"] == [{"type": "text", "text": "b"}]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f"]
    assert (result["role"], result["name"], result["tool_call_id"]) == ("tool", "f", "1")
    assert last == {"role": "assistant", "content": turn["content"]}


@pytest.mark.parametrize("second", [THOUGHTS, SAID])
def test_a_turn_has_each_once(second: dict[str, Any]) -> None:
    assert len(messages(THOUGHTS, SAID, second)) == 2
    assert len(messages(CALL, second)) == 2


def test_summaries_stand_for_thoughts_that_are_missing() -> None:
    (turn,) = messages({"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]})
    assert turn["reasoning_content"] == "short"


async def words(request: ChatCompletionRequest) -> int:
    return sum(len(message["content"].split()) for message in request.messages)


def conversation(*messages: tuple[str, str]) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": role, "content": content} for role, content in messages])


ALL, LAST_TWO, LAST = ["s", "a b", "c", "d e", "f"], ["s", "d e", "f"], ["s", "f"]


@pytest.mark.parametrize(("room", "kept"), [(6, ALL), (7, LAST_TWO), (9, LAST_TWO), (10, LAST), (12, LAST)])
def test_the_oldest_turns_go(room: int, kept: list[str]) -> None:
    """Seven words, in a context of thirteen."""
    request = conversation(("system", "s"), ("user", "a b"), ("assistant", "c"), ("user", "d e"), ("user", "f"))
    request.max_tokens = room
    asyncio.run(fit_context(request, 13, words))
    assert [message["content"] for message in request.messages] == kept


def test_a_conversation_without_a_user_is_left() -> None:
    request = conversation(("system", "a b c"), ("assistant", "d"))
    asyncio.run(fit_context(request, 2, words))
    assert len(request.messages) == 2


def test_the_input_of_answers_on_their_way_counts_and_gives_way() -> None:
    store = ResponseStore(max_bytes=100, max_entry_bytes=60)
    store.put("ended", StoredResponse(b"x" * 30))
    first, second, large = (HeldInput(b"[" + b"1" * size + b"]", 1) for size in (48, 38, 70))
    for held in (first, second, large):
        store.hold(held)
    assert len(store) == 0 and large.items is None and first.items is not None and second.items is not None
    third = HeldInput(b"x" * 50, 1)
    store.hold(third)
    assert first.items is None and second.items is not None
    del third  # its client has left
    store.hold(fourth := HeldInput(b"x" * 60, 1))
    assert fourth.items is not None and second.items is not None
    assert msgspec.json.decode(HeldInput.of([{"a": 1}]).take_conversation([{"b": 2}])) == [{"a": 1}, {"b": 2}]
