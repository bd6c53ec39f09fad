"""Answers with many vectors: sent in pieces of a bounded size, and together the JSON that they would be at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from sglang.srt.configs.sentence_modules import NO_MODULES
from sglang.srt.entrypoints import http_stream, long_json
from sglang.srt.entrypoints.embeddings import serving_embeddings
from sglang.srt.entrypoints.embeddings.protocol import EmbeddingRequest, EncodeBody
from sglang.srt.entrypoints.http_stream import EventStream, Generated
from sglang.srt.entrypoints.long_json import LongJSON
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT, length_of
from sglang.srt.entrypoints.native_answer import whole_answer
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_events import NativeEvents
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams

VECTORS = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
MIB = 1 << 20


def sent(response: Response) -> tuple[Any, list[bytes]]:
    """Returns the answer, and the pieces in which it is sent."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    asyncio.run(response({"type": "http"}, receive, send))
    head, *bodies = messages
    assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]
    body = b"".join(body["body"] for body in bodies)
    headers = dict(head["headers"])
    assert headers[b"content-length"] == str(len(body)).encode() and headers[b"content-type"] == b"application/json"
    return json.loads(body), [body["body"] for body in bodies]


def answer(monkeypatch: pytest.MonkeyPatch, ask: Any, body: Any) -> tuple[Any, list[bytes]]:
    outputs = [
        SimpleNamespace(index=i, hidden=vector.tobytes(), meta=SimpleNamespace(prompt_tokens=3), finish=None)
        for i, vector in enumerate(VECTORS)
    ]
    stream = SimpleNamespace(is_batch=True, requests=[SimpleNamespace(rid=f"r{i}") for i in range(len(outputs))])

    async def collect(*_: object) -> Any:
        return stream, outputs

    monkeypatch.setattr(serving_embeddings, "collect_complete", collect)
    monkeypatch.setattr(serving_embeddings, "request_info", lambda rid, *_: {"id": rid})
    model = SimpleNamespace(labels=None, sentence_modules=NO_MODULES)
    service: Any = SimpleNamespace(model_name="m", manager=SimpleNamespace(model_config=model))
    return sent(asyncio.run(ask(service, body, None)))


@pytest.mark.parametrize("route", ["/v1/embeddings", "/encode"])
def test_no_piece_has_all_vectors(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if route == "/encode":
        results, pieces = answer(monkeypatch, serving_embeddings.encode, EncodeBody(text=["a"] * len(VECTORS)))
        assert [result["meta_info"]["id"] for result in results] == [f"r{i}" for i in range(len(VECTORS))]
    else:
        whole, pieces = answer(monkeypatch, serving_embeddings.embeddings, EmbeddingRequest(input=["a"] * len(VECTORS)))
        results = whole["data"]
        assert [result["index"] for result in results] == list(range(len(VECTORS))) and whole["model"] == "m"
    for result, vector in zip(results, VECTORS, strict=True):
        np.testing.assert_allclose(result["embedding"], vector / np.linalg.norm(vector), rtol=1e-5)
    assert sum(map(len, pieces)) > 4 * MIB and max(map(len, pieces)) < 1.5 * MIB


def native(num_top: int = 0) -> tuple[Any, GenerateRequest, TokenizedGenerateReq, GenerateOutput]:
    """A front without a tokenizer, a call, its request, and an output with 42 hidden states, or many log
    probabilities."""
    front: Any = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(hidden_size=4096))
    request = TokenizedGenerateReq(
        rid="r", input_ids=np.zeros(40, np.int32), sampling_params=SamplingParams(), hidden_start=-1 if num_top else 0
    )
    logprobs = OutputLogprobs(num_top)
    logprobs.output += np.zeros((300, 2 + 2 * num_top), np.int32).tobytes()
    hidden = b"" if num_top else VECTORS[:42].tobytes()
    values = logprobs if num_top else None
    output = GenerateOutput(0, "", [1, 2, 3], FinishReason("stop"), TokenMeta(40, 3), values, hidden)
    return front, GenerateRequest(input_ids=[0]), request, output


def check(result: Any, num_top: int) -> None:
    info = result["meta_info"]
    if num_top:
        assert info["output_top_logprobs"] == [[[0.0, 0, None]] * num_top] * 300
        return
    prompt, *outputs = info["hidden_states"]
    np.testing.assert_array_equal(np.array(prompt, np.float32), VECTORS[:40])
    np.testing.assert_array_equal(np.array(outputs, np.float32), VECTORS[40:42])


@pytest.mark.parametrize("num_top", [0, 1000])
def test_an_answer_is_sent_in_pieces(num_top: int) -> None:
    """Hidden states, and log probabilities."""
    front, call, request, output = native(num_top)

    async def submit(_: GenerateRequest) -> GenerationStream:
        stream = GenerationStream([request], [None], 1, lambda _: None)
        stream.push(output)
        return stream

    front.submit = submit
    result, pieces = sent(asyncio.run(whole_answer(front, call)))
    check(result, num_top)
    assert max(map(len, pieces)) < 1.5 * MIB < sum(map(len, pieces))


class SlowClient:
    """Reads after `pause` seconds each time, and notes what it is sent."""

    def __init__(self, pause: float) -> None:
        self.sent: list[bytes] = []
        self.pause = pause

    def write(self, body: bytes) -> bool:
        self.sent.append(body)
        return False

    async def drain(self) -> None:
        await asyncio.sleep(self.pause)


@pytest.mark.parametrize("num_top", [0, 1000])
@pytest.mark.parametrize("comes", ["first", "later"])
def test_an_event_is_sent_in_pieces(num_top: int, comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing between them, though a slow client makes pauses in which a connection is kept alive."""
    monkeypatch.setattr(http_stream.envs, "SGLANG_SSE_KEEP_ALIVE", 0.005)
    front, call, request, output = native(num_top)
    events = NativeEvents(front, call, GenerationStream([request], [None], 1, lambda _: None), incremental=True)
    early = replace(output, finish=None, logprobs=None, hidden=b"")
    client = SlowClient(0.02)

    async def outputs() -> AsyncGenerator[GenerateOutput, None]:
        yield early if comes == "later" else output
        yield output if comes == "later" else early

    async def main() -> None:
        source = outputs()
        first = events.write(await anext(source))
        response = EventStream(first, Generated(source), events.write, "/generate", length=length_of)

        async def send(message: Any) -> None:
            client.sent.append(message.get("body", b""))

        scope = {"type": "http", http_stream.BODY_WRITER: client}
        await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # the client stays

    asyncio.run(main())
    kept_alive = b"".join(client.sent).count(http_stream.SSE.keep_alive)
    stream = b"".join(client.sent).replace(http_stream.SSE.keep_alive, b"")
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    check(json.loads(lines[0 if comes == "first" else 1]), num_top)
    assert lines[2:] == [b"[DONE]"] and kept_alive < len(client.sent)
    assert max(map(len, client.sent)) < 1.5 * MIB < sum(map(len, client.sent))
    inside = [body for body in client.sent if body != http_stream.SSE.keep_alive]
    at = client.sent.index(next(body for body in inside if len(body) > MIB))
    assert len(client.sent[at + 1]) > 1000, "no keep-alive between the pieces"


@pytest.mark.parametrize(("count", "length", "at_once"), [(20, LONG_OUTPUT // 2 + 1, 2), (6000, 0, 2049)])
def test_events_of_many_sequences_are_written_in_turns(count: int, length: int, at_once: int) -> None:
    """A client that has not read for a while finds an output of each sequence; other callbacks run between them."""
    requests = [native(0)[2]] * count
    client, turns, written = SlowClient(0.0), list[int](), 0

    def write(output: GenerateOutput) -> bytes:
        nonlocal written
        written += 1
        return b"data: x\n\n"

    async def tick() -> None:
        while True:
            turns.append(written)
            await asyncio.sleep(0)

    async def main() -> None:
        stream = GenerationStream(requests, [None] * count, 1, lambda _: None)
        for index in range(count):
            stream.push(GenerateOutput(index, "x" * length, [1], FinishReason("stop"), TokenMeta(1, 1), None))
        response = EventStream(b"", stream, write, "/generate", length=length_of)

        async def send(message: Any) -> None:
            client.sent.append(message.get("body", b""))

        ticks = asyncio.ensure_future(tick())
        scope = {"type": "http", http_stream.BODY_WRITER: ReadingClient(client.sent)}
        await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        ticks.cancel()

    asyncio.run(main())
    assert written == count == b"".join(client.sent).count(b"data: x")
    assert max(after - before for before, after in pairwise(turns)) <= at_once


class ReadingClient:
    """Has always read everything."""

    def __init__(self, sent: list[bytes]) -> None:
        self.sent = sent

    def write(self, body: bytes) -> bool:
        self.sent.append(body)
        return True

    async def drain(self) -> None:
        return None


@pytest.mark.parametrize("leaves", [False, True])
def test_the_room_of_an_answer_is_kept_until_it_was_sent(leaves: bool) -> None:
    """Or until the client leaves; what was sent is dropped."""
    front, call, request, output = native(1000)
    closed, held = list[bool](), list[int]()

    async def submit(_: GenerateRequest) -> GenerationStream:
        stream = GenerationStream([request], [None], 1, lambda _: closed.append(True))
        stream.push(output)
        return stream

    async def main() -> None:
        front.submit = submit
        response = await whole_answer(front, call)
        pieces = response._pieces  # type: ignore[attr-defined]

        async def send(message: Any) -> None:
            assert not closed
            held.append(sum(map(len, pieces)))
            if leaves and len(held) == 3:
                raise asyncio.CancelledError

        with contextlib.suppress(asyncio.CancelledError):
            await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        del response
        while not closed:  # the thread that wrote it may still hold it
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert held == sorted(held, reverse=True) and held[0] > held[-1]


def test_an_answer_that_is_read_too_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "UNREAD_LIMIT_S", 0.01)
    monkeypatch.setattr(long_json, "SLOWEST_CLIENT", 1 << 40)
    long = LongJSON()
    response, sizes = long.response({"a": long.part([b"[", b"1," * MIB, b"1]"])}), list[int]()

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))
        if len(sizes) == 2:
            await asyncio.Event().wait()

    asyncio.run(response({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
    assert len(sizes) == 2


def test_an_answer_without_long_parts() -> None:
    assert sent(LongJSON().response({"a": [1]})) == ({"a": [1]}, [b'{"a":[1]}'])
