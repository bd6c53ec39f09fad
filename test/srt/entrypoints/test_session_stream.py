"""The output of a session's request is collected piece by piece."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sglang.srt.entrypoints import http_sessions
from sglang.srt.entrypoints.http_sessions import SessionParams, session_result, session_stream
from sglang.srt.managers.front import native_output
from sglang.srt.managers.front.generate_request import GenerateRequest
from sglang.srt.managers.front.sessions import SessionStore, Turn
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager


class Piece(list[int]):
    """New token ids, which nobody may add to a copy of all tokens before."""

    def __radd__(self, before: list[int]) -> list[int]:
        raise AssertionError(f"{len(before)} tokens are copied for {len(self)} more")


def test_a_new_piece_does_not_copy_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore()
    session = store.open(1000, None)
    turn = Turn("a", None, np.array([7], np.int32), 1)

    async def begun(*_: Any) -> Turn:
        store.begin(session, turn)
        return turn

    async def stream(*_: Any) -> AsyncGenerator[dict[str, Any], None]:
        for piece, reason in ((Piece([1, 2]), None), (Piece([3]), None), (Piece([4]), {"type": "stop"})):
            yield {"output_ids": piece, "meta_info": {"finish_reason": reason}}

    monkeypatch.setattr(http_sessions, "begin_turn", begun)
    monkeypatch.setattr(http_sessions, "native_stream", stream)

    async def pieces() -> list[list[int]]:
        manager = cast(TokenizerManager, None)
        results = session_stream(manager, store, GenerateRequest(), SessionParams(id=session), incremental=True)
        return [result["output_ids"] async for result in results]

    assert asyncio.run(pieces()) == [[1, 2], [3], [4]]
    assert turn.ended and turn.tokens.tolist() == [7, 1, 2, 3, 4]


def test_a_whole_answer_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result for each message would hold everything so far each time."""
    store = SessionStore()
    session = store.open(1000, None)
    turn = Turn("a", None, np.array([7], np.int32), 1)

    async def begun(*_: Any) -> Turn:
        store.begin(session, turn)
        return turn

    async def whole(*_: Any) -> dict[str, Any]:
        return {"output_ids": [1, 2, 3], "meta_info": {"finish_reason": {"type": "stop"}}}

    monkeypatch.setattr(http_sessions, "begin_turn", begun)
    monkeypatch.setattr(http_sessions, "native_results", whole)
    monkeypatch.setattr(http_sessions, "native_stream", lambda *_: pytest.fail("a result for each message"))
    result = asyncio.run(
        session_result(cast(TokenizerManager, None), store, GenerateRequest(), SessionParams(id=session))
    )
    assert result["output_ids"] == [1, 2, 3]
    assert turn.ended and turn.tokens.tolist() == [7, 1, 2, 3]


@pytest.mark.parametrize("num_values", [1, 1 << 13])
def test_many_log_probabilities_are_written_in_a_thread(num_values: int) -> None:
    threads: list[int] = []
    writer: Any = SimpleNamespace(result=lambda *_: threads.append(threading.get_ident()) or {})
    logprobs: Any = SimpleNamespace(num_values=num_values)
    output: Any = None
    asyncio.run(native_output._result(writer, output, "", [], logprobs))
    assert (threads == [threading.get_ident()]) == (num_values == 1)
