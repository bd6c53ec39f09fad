"""Streams whose outputs the event loop hands over, and `/generate`'s events, beside the dicts that they are."""

from __future__ import annotations

import asyncio
import copy
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.managers.front import native_events, native_output
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, RequestError
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_events import NativeEvents, results_json
from sglang.srt.managers.front.native_output import ResultWriter, native_stream
from sglang.srt.managers.wire.io_struct import DraftCounts, FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling import output_logprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import json_list
from srt.sampling.packed_logprobs import packed

END = FinishReason("stop", matched="x")


def new_stream(num: int = 1, samples: int = 1) -> GenerationStream:
    requests = [
        TokenizedGenerateReq(rid=str(i), input_ids=np.array([1, 2], np.int32), sampling_params=SamplingParams())
        for i in range(num)
    ]
    return GenerationStream(requests, [None] * num, samples, lambda stream: None)


def output(text: str, finish: FinishReason | None = None, index: int = 0, **fields: Any) -> GenerateOutput:
    ids = [len(text), 151_000]
    return GenerateOutput(**{"index": index, "text": text, "new_ids": ids, "finish": finish, "meta": TokenMeta(2, 2),
                             "logprobs": None} | fields)  # fmt: skip


async def turns() -> None:
    """Until the event loop has nothing to do."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_outputs_are_handed_over_as_they_come() -> None:
    async def main() -> None:
        stream, taken = new_stream(), list[str]()
        stream.push(output("before"))
        reader = asyncio.ensure_future(stream.forward(lambda each: taken.append(each.text) or True))
        await turns()
        assert taken == ["before"]
        stream.push(output("a"))
        stream.push(output("b"))
        assert taken == ["before"]
        await turns()
        assert taken == ["before", "ab"] and not reader.done()  # what came together is merged
        stream.push(output("c", END))
        assert await reader is True and taken[-1] == "c"

    asyncio.run(main())


@pytest.mark.parametrize("last", [False, True])
def test_a_pause_merges_what_comes_meanwhile(last: bool) -> None:
    async def main() -> None:
        stream, taken, pauses = new_stream(), list[str](), [True, False]

        def take(each: GenerateOutput) -> bool:
            taken.append(each.text)
            return pauses.pop(0) if pauses else True

        reader = asyncio.ensure_future(stream.forward(take))
        for text in ("a", "b"):
            await turns()
            stream.push(output(text, END if last and text == "b" else None))
        assert await reader is False and taken == ["a", "b"]
        if not last:
            for text in ("c", "d", "e"):
                stream.push(output(text, END if text == "e" else None))
                await turns()
        assert taken == ["a", "b"]
        assert await stream.forward(take) is True and taken == (["a", "b"] if last else ["a", "b", "cde"])

    asyncio.run(main())


def test_an_error_comes_behind_what_was_there() -> None:
    async def main() -> None:
        stream, taken = new_stream(), list[str]()
        reader = asyncio.ensure_future(stream.forward(lambda each: taken.append(each.text) or True))
        await turns()
        stream.push(output("a"))
        stream.fail(RequestError("gone", 503))
        with pytest.raises(RequestError, match="gone"):
            await reader
        assert taken == ["a"] and stream.closed

    asyncio.run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_what_the_reader_raises_comes_out(waits: bool) -> None:
    async def main() -> None:
        stream = new_stream()

        def take(each: GenerateOutput) -> bool:
            raise KeyError(each.text)

        if not waits:
            stream.push(output("a"))
        reader = asyncio.ensure_future(stream.forward(take))
        await turns()
        if waits:
            stream.push(output("a"))
        with pytest.raises(KeyError, match="a"):
            await reader

    asyncio.run(main())


def test_a_cancelled_reader_gets_nothing_more() -> None:
    async def main() -> None:
        stream, taken = new_stream(), list[str]()
        reader = asyncio.ensure_future(stream.forward(lambda each: taken.append(each.text) or True))
        await turns()
        stream.push(output("a"))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await turns()
        assert reader.cancelled() and (await anext(stream)).text in ("", "a")

    asyncio.run(main())


PIECES = ("He", "", 'l"\\\n\x07', "ö\u2028€😀", "</script>", "")


def outputs_of(num: int, logprobs: bool) -> list[GenerateOutput]:
    """Of `num` sequences in turn: with escapes, without text, without ids, drafted, loaded from main memory."""
    all_of_them = []
    for at, text in enumerate(PIECES):
        for index in range(num):
            end = at == len(PIECES) - 1
            values = packed([(-0.5, at), (-1e-9, 7)], [[(-0.5, at)], [(-0.25, 9)]])
            if at == 0:
                values = packed([(-0.5, 8)], [[(-0.1, 8)]], input=[(None, 1), (-2.5, 2)], input_top=[None, [(-1.0, 3)]])
            meta = TokenMeta(2, 2 * at + 2, host_tokens=1 if at > 2 else None)
            meta.drafts = DraftCounts(4, 9, 5, [1, 3]) if at > 3 else None
            each = output(text, END if end else None, index, meta=meta, logprobs=values if logprobs else None)
            all_of_them.append(each if not end else GenerateOutput(**{**fields(each), "new_ids": []}))
    return all_of_them


def fields(each: GenerateOutput) -> dict[str, Any]:
    return {name: getattr(each, name) for name in GenerateOutput.__slots__}


@pytest.mark.parametrize(
    ("incremental", "has_text", "num", "logprobs", "thoughts"), list(itertools.product(*[(False, True)] * 5))
)
def test_native_events_are_the_dicts(
    incremental: bool, has_text: bool, num: bool, logprobs: bool, thoughts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte: `native_stream` is what `Engine` gives, and what `/generate` wrote from."""
    monkeypatch.setattr(native_output, "time", SimpleNamespace(monotonic=lambda: 7.25))
    count = 2 if num else 1
    req = GenerateRequest(input_ids=[1, 2], counts_thoughts=thoughts)
    tokenizer = object() if has_text else None
    manager: Any = SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(hidden_size=8))

    async def dicts() -> list[bytes]:
        stream, wanted = new_stream(count, count), list[bytes]()

        async def submit(_: GenerateRequest) -> GenerationStream:
            return stream

        manager.submit = submit
        results = native_stream(manager, req, incremental)
        for each in outputs_of(count, logprobs):
            stream.push(each)
            wanted.append(b"data: " + msgspec.json.encode(await anext(results)) + b"\n\n")
        assert await anext(results, None) is None
        return wanted

    wanted = asyncio.run(dicts())
    events = NativeEvents(manager, req, new_stream(count, count), incremental)
    assert [b"".join(events.write(copy.deepcopy(each))) for each in outputs_of(count, logprobs)] == wanted
    assert len(wanted) == count * len(PIECES) and events.end() == b""


def front(tokenizer: Any = None) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(hidden_size=8))


STATES = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
"""Of a prompt of two tokens and an output of four."""


@pytest.mark.parametrize("at_once", [1, 30, 1 << 12])
@pytest.mark.parametrize(("many", "num_states"), [(False, 5), (True, 5), (False, 2), (False, 0)])
def test_a_whole_answer_is_the_dicts(
    many: bool, num_states: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte, however few values are written at a time."""
    monkeypatch.setattr(native_output, "time", SimpleNamespace(monotonic=lambda: 7.25))
    manager, req, stream = front(object()), GenerateRequest(input_ids=[1, 2]), new_stream(2, 2)
    stream.requests[0].hidden_start = 0
    hidden = STATES[:num_states].tobytes()
    values = packed(
        [(-0.1 * i, i) for i in range(50)], [[(-0.3, i), (-2.5, 7)] for i in range(50)],
        [[(-0.7 * i, 4)] for i in range(50)],
        [(None, 1), (-2.5, 2)], [None, [(-1.0, 3), (-1.5, 4)]], [None, [(-1e-7, 4)]],
    )  # fmt: skip
    outputs = [
        output("He", END, index, logprobs=values if index == many else None, hidden=b"" if index else hidden)
        for index in range(2 if many else 1)
    ]
    dicts = ResultWriter(manager, req, stream)
    wanted = [dicts.result(each, each.text, each.new_ids, each.logprobs) for each in copy.deepcopy(outputs)]
    for result in wanted:
        states = result["meta_info"].get("hidden_states")
        if states is not None:
            assert [each.shape for each in states] == ([(2, 8)] + [(8,)] * (num_states - 2) if num_states else [])
            result["meta_info"]["hidden_states"] = [each.tolist() for each in states]
    encoded = list[int]()

    def encode(value: Any) -> bytes:
        encoded.append(num_floats(value))
        return msgspec.json.encode(value)

    for module, name in ((output_logprobs, "VALUES_AT_ONCE"), (json_list, "ARRAY_VALUES")):
        monkeypatch.setattr(module, name, at_once)
    monkeypatch.setattr(json_list, "encode", encode)
    monkeypatch.setattr(json_list, "PIECE_BYTES", at_once)
    pieces = results_json(NativeEvents(manager, req, stream, incremental=True), outputs, many)
    assert b"".join(pieces) == msgspec.json.encode(wanted if many else wanted[0])
    assert max(encoded) <= max(8, at_once)


def num_floats(value: Any) -> int:
    """In nested lists."""
    return sum(map(num_floats, value)) if isinstance(value, list) else isinstance(value, float)


def test_log_probabilities_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many events repeat them."""
    encoded = list[int]()

    def encode(value: Any) -> bytes:
        encoded.append(len(value))
        return msgspec.json.encode(value)

    monkeypatch.setattr(native_events, "_encode", encode)
    monkeypatch.setattr(json_list, "encode", encode)
    events = NativeEvents(front(), GenerateRequest(input_ids=[1, 2]), new_stream(), incremental=False)
    for _ in range(50):
        last = b"".join(events.write(output("", logprobs=packed([(-0.5, 1), (-0.25, 2)]))))
    info = msgspec.json.decode(last.removeprefix(b"data: "))["meta_info"]
    assert len(info["output_token_logprobs"]) == 100 and max(encoded) < 20


class Counted(str):
    """A text that counts the characters that are copied to append to it."""

    num_copied = 0

    def __add__(self, other: str) -> Counted:
        Counted.num_copied += len(self) + len(other)
        return Counted(str.__add__(self, other))


@pytest.mark.parametrize("collects", [False, True])
def test_texts_that_wait_for_a_reader_are_joined_once(collects: bool) -> None:
    async def main() -> list[GenerateOutput]:
        stream = new_stream()
        finish = FinishReason("stop")
        for number in range(100):
            last = finish if number == 99 else None
            stream.push(GenerateOutput(0, Counted("ab"), [number], last, TokenMeta(1, number + 1), None))
        return await stream.collect() if collects else [output async for output in stream]

    Counted.num_copied = 0
    (output,) = asyncio.run(main())
    assert (output.text, output.new_ids, output.meta.completion_tokens) == ("ab" * 100, [*range(100)], 100)
    assert not Counted.num_copied
