"""The prompts of sessions, before anything is sent."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.http_sessions import SessionParams, begin_turn
from sglang.srt.managers.front import request_preparation
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.managers.front.request_preparation import RequestPreparer
from sglang.srt.managers.front.sessions import SessionStore, Turn
from sglang.srt.server_args import ServerArgs

CONTEXT, VOCAB, BOS = 32, 100, 1


class Front:
    """What sessions see of the tokenizer manager. A letter is a token."""

    def __init__(self, **flags: Any) -> None:
        args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **flags)
        model = dataclasses.replace(ModelConfig.from_server_args(args), context_len=CONTEXT, vocab_size=VOCAB)
        self.lengths: list[int] = []
        self.preparer = RequestPreparer(args, model, self.encode)
        self.media = None
        self.tokenizer = SimpleNamespace(bos_token_id=BOS)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.lengths.append(len(text))
        return [BOS] * add_special_tokens + [5] * len(text)

    def replica_for(self, ids: list[int], wanted: int | None) -> int:
        return 0


def session_with(*tokens: int, streaming: bool = False) -> tuple[SessionStore, str]:
    """A session with one request `first` of these tokens, or none."""
    store = SessionStore()
    session_id = store.open(1 << 20, None, streaming=streaming)
    if tokens:
        turn = Turn("first", None, np.array(tokens, np.int32), len(tokens))
        store.begin(session_id, turn)
        store.end(session_id, turn, [])
    return store, session_id


def begin(front: Any, store: SessionStore, params: SessionParams, **fields: Any) -> list[int]:
    """The prompt that is sent."""
    call = GenerateRequest(**fields)
    turn = asyncio.run(begin_turn(front, store, call, params))
    assert turn.tokens is call.input_ids
    return turn.tokens.tolist()


@pytest.mark.parametrize("tokens", [(), (5, 6)])
def test_a_text_is_bounded_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]) -> None:
    monkeypatch.setattr(request_preparation, "PIECE_CHARS", 100)
    front, (store, session_id) = Front(), session_with(*tokens)
    params = SessionParams(session_id, "first" if tokens else None)
    with pytest.raises(RequestError, match="longer than the model's context length"):
        begin(front, store, params, text="a" * 10_000)
    assert max(front.lengths) == 100


@pytest.mark.parametrize("streaming", [False, True])
def test_what_goes_on_has_no_second_beginning(streaming: bool) -> None:
    """Neither the one that the tokenizer would add nor one that the client has put there."""
    for fields in ({"text": "aa"}, {"input_ids": [BOS, 5, 5]}):
        store, session_id = session_with(BOS, 7, streaming=streaming)
        params = SessionParams(session_id, None if streaming else "first")
        assert begin(Front(), store, params, **fields) == [BOS, 7, 5, 5]
        store, session_id = session_with(streaming=streaming)
        assert begin(Front(), store, SessionParams(session_id), **fields) == [BOS, 5, 5]


def test_a_session_keeps_what_is_left_of_a_truncated_prompt() -> None:
    store, session_id = session_with(*[6] * 20)
    front = Front(allow_auto_truncate=True)
    assert begin(front, store, SessionParams(session_id, "first"), input_ids=[5] * 20) == [6] * 20 + [5] * 11


def test_a_session_that_changed_meanwhile_is_not_gone_on_from() -> None:
    """Another request of a streaming session began while this one was tokenized."""
    store, session_id = session_with(6, 7, streaming=True)

    async def two() -> list[Any]:
        calls = [GenerateRequest(text="a", rid=rid) for rid in "ab"]
        front: Any = Front()
        turns = (begin_turn(front, store, call, SessionParams(session_id)) for call in calls)
        return await asyncio.gather(*turns, return_exceptions=True)

    first, second = asyncio.run(two())
    assert isinstance(first, Turn) and isinstance(second, RequestError)


@pytest.mark.parametrize("reason", ["context length", "capacity_of_str_len"])
def test_what_would_be_replaced_stays_after_a_refusal(reason: str) -> None:
    """Later turns are dropped, and those that run aborted, only for a request that is accepted."""
    front, (store, session_id) = Front(), session_with(BOS, 5)
    aborted: list[str] = []
    front.abort = aborted.append  # type: ignore[attr-defined]
    store.begin(session_id, Turn("later", "first", np.array([BOS, 5, 6], np.int32), 3))
    store._sessions[session_id].capacity = 1 << 20 if reason == "context length" else 10
    params = SessionParams(session_id, "first", replace=True)
    with pytest.raises(RequestError, match=reason):
        begin(front, store, params, input_ids=[7] * (CONTEXT - 1 if reason == "context length" else 9))
    assert store.turn(session_id, "later") is not None and not aborted
    assert begin(front, store, params, input_ids=[7]) == [BOS, 5, 7]
    assert aborted == ["later"]
    with pytest.raises(RequestError, match="no request"):
        store.turn(session_id, "later")
