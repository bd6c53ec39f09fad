"""The output of a session's request is collected piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.entrypoints import http_sessions, long_outputs
from sglang.srt.entrypoints.http_sessions import SessionParams, session_answer, session_events
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.sessions import SessionStore, Turn
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from srt.sampling.packed_logprobs import packed


class Piece(list[int]):
    """New token ids, which nobody may add to a copy of all tokens before."""

    def __radd__(self, before: list[int]) -> list[int]:
        raise AssertionError(f"{len(before)} tokens are copied for {len(self)} more")


class Bench:
    """A session whose one turn has begun, and a manager that gives it a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = SessionStore()
        self.params = SessionParams(id=self.store.open(1000, None))
        self.turn = Turn("a", None, np.array([7], np.int32), 1)
        request = TokenizedGenerateReq(rid="a", input_ids=np.array([7], np.int32), sampling_params=SamplingParams())
        self.stream = GenerationStream([request], [None], 1, lambda _: None)
        self.manager: Any = SimpleNamespace(
            submit=self.submit, tokenizer=None, model_config=SimpleNamespace(hidden_size=8)
        )
        self.call = GenerateRequest(input_ids=[7])
        monkeypatch.setattr(http_sessions, "begin_turn", self.begun)

    async def begun(self, *_: Any) -> Turn:
        self.store.begin(self.params.id, self.turn)
        return self.turn

    async def submit(self, _: GenerateRequest) -> GenerationStream:
        return self.stream

    def push(self, ids: list[int], last: bool, logprobs: OutputLogprobs | None = None) -> None:
        finish = FinishReason("stop") if last else None
        self.stream.push(GenerateOutput(0, "", Piece(ids), finish, TokenMeta(1, 1), logprobs))


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


@pytest.mark.parametrize("incremental", [False, True])
def test_a_new_piece_does_not_copy_those_before(incremental: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    async def events() -> list[list[int]]:
        found = []
        events = session_events(bench.manager, bench.store, bench.call, bench.params, incremental)
        for ids in ([1, 2], [3], [4]):
            bench.push(ids, ids == [4])
            event = await anext(events)
            assert isinstance(event, bytes)
            found.append(msgspec.json.decode(event.removeprefix(b"data: "))["output_ids"])
        assert await anext(events, None) is None
        return found

    assert run(events) == ([[1, 2], [3], [4]] if incremental else [[1, 2], [1, 2, 3], [1, 2, 3, 4]])
    assert bench.turn.ended and bench.turn.tokens.tolist() == [7, 1, 2, 3, 4]


def test_a_whole_answer_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result for each message would hold everything so far each time."""
    bench = Bench(monkeypatch)

    async def answer() -> Any:
        work = asyncio.ensure_future(session_answer(bench.manager, bench.store, bench.call, bench.params))
        await asyncio.sleep(0)
        for ids in ([1], [2], [3]):
            bench.push(ids, ids == [3])
        return msgspec.json.decode((await work).body)

    assert run(answer)["output_ids"] == [1, 2, 3]
    assert bench.turn.ended and bench.turn.tokens.tolist() == [7, 1, 2, 3]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_values", [1, long_outputs.LONG_OUTPUT + 1])
def test_many_log_probabilities_are_written_in_a_thread(
    whole: bool, num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sent in pieces, before the room of their stream is given back."""
    bench, order = Bench(monkeypatch), list[str]()
    in_thread = long_outputs.in_thread

    async def noted(work: Any) -> Any:
        result = await in_thread(work)
        order.append("written")
        return result

    monkeypatch.setattr(long_outputs, "in_thread", noted)
    bench.stream._on_close = lambda _: order.append("closed")

    async def answer() -> Any:
        bench.push([1], True, packed([(-0.5, 1)] * num_values))
        if whole:
            return (await session_answer(bench.manager, bench.store, bench.call, bench.params)).body
        (event,) = [e async for e in session_events(bench.manager, bench.store, bench.call, bench.params, True)]
        assert isinstance(event, bytes) is (num_values == 1)
        return b"".join(event) if isinstance(event, list) else event

    body = run(answer)
    info = msgspec.json.decode(body.removeprefix(b"data: "))["meta_info"]
    assert info["output_token_logprobs"] == [[-0.5, 1, None]] * num_values
    assert order == (["closed"] if num_values == 1 else ["written", "closed"])
