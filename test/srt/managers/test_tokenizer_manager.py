"""The tokenizer manager against a scheduler that the test plays by hand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import output_formats
from sglang.srt.entrypoints.openai.protocol import ParseCallsRequest
from sglang.srt.entrypoints.openai.serving import answered
from sglang.srt.function_call.model_formats import ModelFormats
from sglang.srt.managers.front import (
    logprob_budget,
    request_preparation,
    result_limits,
    text_encoder,
    tokenizer_manager,
)
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest, RequestError
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.native_output import native_results, native_stream
from sglang.srt.managers.front.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    BatchStrOut,
    ControlReply,
    ControlReq,
    FinishReason,
    SchedulerInput,
    SchedulerReady,
    SchedulerStats,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.sampling.output_logprobs import OutputLogprobs
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from srt.sampling.packed_logprobs import packed

LENGTH = FinishReason("length", length=2)
ABORTED = FinishReason("abort", message="Aborted", status_code=499)


class Bench:
    """A manager, and the other ends of its channels."""

    def __init__(self, **flags: Any) -> None:
        args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **flags)
        self.ports = ipc.Ports.create()
        self.manager = TokenizerManager(args, ModelConfig.from_server_args(args), [self.ports], load_tokenizer(args))
        self.inbox = ipc.scheduler_inbox(self.ports)
        self.outbox = ipc.detokenizer_outbox(self.ports)

    async def received(self) -> SchedulerInput:
        while (message := self.inbox.recv_nowait()) is None:
            await asyncio.sleep(0.001)
        return message

    async def request(self) -> TokenizedGenerateReq:
        message = await self.received()
        assert isinstance(message, TokenizedGenerateReq)
        return message

    async def nothing_received(self) -> bool:
        await asyncio.sleep(0.03)
        return self.inbox.recv_nowait() is None

    def send(
        self,
        rid: str,
        text: str = "",
        ids: list[int] | None = None,
        finish: FinishReason | None = None,
        logprobs: OutputLogprobs | None = None,
        first_token_time: float = 0.0,
    ) -> None:
        meta = TokenMeta(
            prompt_tokens=3,
            completion_tokens=len(ids or []),
            cached_tokens=1,
            started_time=time.monotonic(),
            first_token_time=first_token_time,
        )
        self.outbox.send(
            BatchStrOut(
                rids=[rid], new_text=[text], new_ids=[ids or []], finish=[finish], meta=[meta], logprobs=[logprobs]
            )
        )

    async def sync(self) -> None:
        """Until everything sent so far has been handled."""
        reply = asyncio.ensure_future(self.manager.control("ping"))
        message = await self.received()
        assert isinstance(message, ControlReq)
        self.outbox.send(ControlReply(message.id))
        await reply

    def close(self) -> None:
        self.manager.close()
        self.inbox.close()
        self.outbox.close()
        self.ports.remove()


def play(test: Callable[[Bench], Awaitable[None]], **flags: Any) -> None:
    async def main() -> None:
        bench = Bench(**flags)
        try:
            bench.manager.attach()
            bench.manager.mark_up()
            await asyncio.wait_for(test(bench), 300)
            assert bench.manager.num_unfinished == 0
            assert not bench.manager._sequences._groups
        finally:
            bench.close()

    asyncio.run(main())


def call(rid: str | list[str] = "r", **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"input_ids": [1, 2, 3], "rid": rid, **fields})


def test_counts_go_on_where_a_message_has_none() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(stream=True))
        await bench.request()
        counts = []
        bench.send("r", "a", [7])
        counts.append((await anext(stream)).meta)
        for ids in ([8], [9, 10]):
            bench.outbox.send(
                BatchStrOut(rids=["r"], new_text=["b"], new_ids=[ids], finish=[None], meta=[None], logprobs=[None])
            )
            counts.append((await anext(stream)).meta)
        assert [meta.completion_tokens for meta in counts] == [1, 2, 4]
        assert all((meta.prompt_tokens, meta.cached_tokens) == (3, 1) for meta in counts)
        bench.send("r", "c", [11], FinishReason("stop"))
        assert [output.text async for output in stream] == ["c"]

    play(test)


def test_stream_of_deltas() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(stream=True))
        request = await bench.request()
        assert (request.rid, request.input_ids.tolist(), request.stream) == ("r", [1, 2, 3], True)
        bench.send("r", "He", [7])
        first = await anext(stream)
        assert (first.index, first.text, first.new_ids, first.finish) == (0, "He", [7], None)
        bench.send("r", "llo", [8], LENGTH)
        second = await anext(stream)
        assert (second.text, second.new_ids, second.finish) == ("llo", [8], LENGTH)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert await bench.nothing_received()

    play(test)


def test_a_slow_reader_gets_merged_outputs() -> None:
    async def test(bench: Bench) -> None:
        async with await bench.manager.submit(call()) as stream:
            await bench.request()
            for i in range(5):
                logprobs = packed([(-1.0, i)], input=[(None, 1)] if i == 0 else [])
                bench.send("r", str(i), [i], LENGTH if i == 4 else None, logprobs)
            await bench.sync()
            outputs = [output async for output in stream]
        (whole,) = outputs
        assert (whole.text, whole.new_ids, whole.finish) == ("01234", [0, 1, 2, 3, 4], LENGTH)
        assert whole.logprobs == packed([(-1.0, i) for i in range(5)], input=[(None, 1)])

    play(test)


def test_batch_results_in_prompt_order() -> None:
    async def test(bench: Bench) -> None:
        req = call(rid=["a", "b"], input_ids=[[1], [2]], return_text_in_logprobs=True)
        work = asyncio.ensure_future(native_results(bench.manager, req))
        assert [(await bench.request()).rid for _ in range(2)] == ["a", "b"]
        bench.send("b", "B1", [5])
        bench.send("a", "A1", [6], FinishReason("stop", matched="x"))
        bench.send("b", "B2", [64], LENGTH, packed([(-0.5, 64)]))
        results = await work
        assert isinstance(results, list)
        assert [r["text"] for r in results] == ["A1", "B1B2"]
        assert results[1]["output_ids"] == [5, 64]
        info = results[0]["meta_info"]
        assert info["finish_reason"] == {"type": "stop", "matched": "x"}
        assert (info["id"], info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == ("a", 3, 1, 1)
        assert info["e2e_latency"] > 0
        assert results[1]["meta_info"]["output_token_logprobs"] == [[-0.5, 64, bench.manager.tokenizer.token_text(64)]]  # type: ignore[union-attr]

    play(test)


def test_native_stream_is_cumulative_or_incremental() -> None:
    async def test(bench: Bench) -> None:
        for incremental, texts, ids in ((False, ["a", "ab"], [[1], [1, 2]]), (True, ["a", "b"], [[1], [2]])):
            results = native_stream(bench.manager, call(stream=True), incremental)
            step = asyncio.ensure_future(anext(results))
            await bench.request()
            bench.send("r", "a", [1])
            first = await step
            bench.send("r", "b", [2], LENGTH)
            second = await anext(results)
            assert [first["text"], second["text"]] == texts
            assert [first["output_ids"], second["output_ids"]] == ids
            assert first["meta_info"]["finish_reason"] is None
            assert second["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
            assert "index" not in first
            assert await anext(results, None) is None

    play(test)


@pytest.mark.parametrize("stream", [False, True])
def test_all_samples_are_sent_at_once(stream: bool) -> None:
    """The scheduler lets them share the prefill. A sample that waited for the first one's first message would start
    when the first one has ended, unless it streams."""

    async def test(bench: Bench) -> None:
        outputs = await bench.manager.submit(call(input_ids=[1] * 64, sampling_params={"n": 3}, stream=stream))
        assert [(await bench.request()).rid for _ in range(3)] == ["r_0", "r_1", "r_2"]
        for i in range(3):
            bench.send(f"r_{i}", str(i), [i], LENGTH)
        assert [output.text for output in await outputs.collect()] == ["0", "1", "2"]

    play(test)


@pytest.mark.parametrize("collect", [False, True])
def test_a_refusal_raises_with_its_status(collect: bool) -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(sampling_params={"n": 2}))
        await bench.request()
        await bench.request()
        bench.send("r_0", finish=FinishReason("abort", message="The queue is full.", status_code=503))
        with pytest.raises(RequestError, match="queue is full") as caught:
            await (stream.collect() if collect else anext(stream))
        assert caught.value.status_code == 503
        assert await bench.received() == AbortReq(["r_1"])
        bench.send("r_1", finish=ABORTED)
        await bench.sync()

    play(test)


def test_one_failing_prompt_ends_the_batch() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(rid=["a", "b"], input_ids=[[1], [2]]))
        await bench.request()
        await bench.request()
        bench.send("a", finish=FinishReason("abort", message="bad grammar", status_code=400))
        with pytest.raises(RequestError, match="bad grammar"):
            await stream.collect()
        assert await bench.received() == AbortReq(["b"])
        bench.send("b", finish=ABORTED)
        await bench.sync()

    play(test)


def test_closing_aborts_and_keeps_the_id_taken() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        await bench.request()
        await stream.aclose()
        assert await bench.received() == AbortReq(["r"])
        with pytest.raises(RequestError, match="already running"):
            await bench.manager.submit(call())
        bench.send("r", "late", [1])
        bench.send("r", finish=ABORTED)
        await bench.sync()
        again = await bench.manager.submit(call())
        await bench.request()
        bench.send("r", "new", [1], LENGTH)
        assert [output.text for output in await again.collect()] == ["new"]

    play(test)


def test_a_cancelled_reader_aborts() -> None:
    async def test(bench: Bench) -> None:
        work = asyncio.ensure_future(native_results(bench.manager, call()))
        await bench.request()
        work.cancel()
        assert await bench.received() == AbortReq(["r"])
        bench.send("r", finish=ABORTED)
        await bench.sync()

    play(test)


def test_log_probabilities_of_all_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that says its length has its room until it is closed; one that does not may end where room ends."""
    monkeypatch.setattr(logprob_budget, "MAX_ALL_LOGPROBS", 100)
    monkeypatch.setattr(result_limits, "ASSUMED_OUTPUT", 5)

    def wanted(rid: str, **params: Any) -> GenerateRequest:
        return call(rid, return_logprob=True, top_logprobs_num=1, sampling_params=params, stream=True)

    def values(count: int) -> OutputLogprobs:
        return packed([(-0.5, 7)] * count, top=[[(-0.5, 7)]] * count)

    async def test(bench: Bench) -> None:
        said = await bench.manager.submit(wanted("said", max_new_tokens=40))
        await bench.request()
        unsaid = await bench.manager.submit(wanted("unsaid"))
        await bench.request()
        with pytest.raises(RequestError, match="ask for fewer") as caught:
            await bench.manager.submit(wanted("too many", max_new_tokens=6))
        assert caught.value.status_code == 503
        bench.send("unsaid", "a", [1], logprobs=values(10))
        assert (await anext(unsaid)).text == "a"
        bench.send("unsaid", "b", [1], logprobs=values(1))
        with pytest.raises(RequestError, match="ask for fewer") as caught:
            await anext(unsaid)
        assert caught.value.status_code == 503
        assert await bench.received() == AbortReq(["unsaid"])
        bench.send("unsaid", finish=ABORTED, logprobs=values(1))
        bench.send("said", "c", [1] * 40, LENGTH, logprobs=values(40))
        assert [output.text async for output in said] == ["c"]
        await said.aclose()
        later = await bench.manager.submit(wanted("later", max_new_tokens=50))
        await bench.request()
        bench.send("later", "d", [1], LENGTH)
        assert [output.text async for output in later] == ["d"]
        await later.aclose()
        assert not bench.manager._logprobs._shares and not bench.manager._logprobs._reserved

    play(test)


def test_log_probabilities_have_their_room_until_they_are_written() -> None:
    reserved: list[int] = []

    async def test(bench: Bench) -> None:
        def write(_: GenerationStream, outputs: list[GenerateOutput]) -> Response:
            reserved.append(bench.manager._logprobs._reserved)
            return Response(outputs[0].text)

        service: Any = SimpleNamespace(manager=bench.manager)
        client: Any = SimpleNamespace(receive=asyncio.Event().wait, scope={})  # stays
        wanted = call(return_logprob=True, sampling_params={"max_new_tokens": 2})
        work = asyncio.ensure_future(answered(service, client, wanted, write))
        await bench.request()
        bench.send("r", "a", [1, 2], LENGTH, packed([(-0.5, 1), (-0.5, 2)]))
        assert (await work).body == b"a"
        assert reserved == [2] and not bench.manager._logprobs._reserved

    play(test)


def test_log_probabilities_of_a_prompt_come_with_its_first_token() -> None:
    """Though the scheduler sends parts of them before."""

    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(return_logprob=True, logprob_start_len=0, stream=True))
        await bench.request()
        for part in ([(None, 1)], [(-0.1, 2)]):
            bench.send("r", logprobs=packed(input=part))
        await bench.sync()
        bench.send("r", "a", [7], logprobs=packed([(-0.2, 7)], input=[(-0.3, 3)]))
        first = await anext(stream)
        bench.send("r", "b", [8], LENGTH, logprobs=packed([(-0.4, 8)]))
        (second,) = [output async for output in stream]
        assert first.text == "a" and first.new_ids == [7]
        assert first.logprobs == packed([(-0.2, 7)], input=[(None, 1), (-0.1, 2), (-0.3, 3)])
        assert second.logprobs == packed([(-0.4, 8)])
        await stream.aclose()

    play(test)


def test_abort_by_public_id() -> None:
    """All samples end, by one message, and the caller gets what there is."""

    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(sampling_params={"n": 2}))
        for _ in range(2):
            await bench.request()
        assert bench.manager.abort("r")
        assert not bench.manager.abort("other")
        message = await bench.received()
        assert isinstance(message, AbortReq) and sorted(message.rids) == ["r_0", "r_1"]
        bench.send("r_0", "half", [1], ABORTED)
        bench.send("r_1", finish=ABORTED)
        outputs = await stream.collect()
        assert [(o.text, o.finish.type if o.finish else None) for o in outputs] == [("half", "abort"), ("", "abort")]

    play(test)


def test_abort_of_one_sample() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(sampling_params={"n": 2}))
        for _ in range(2):
            await bench.request()
        assert bench.manager.abort("r_1")
        assert await bench.received() == AbortReq(["r_1"])
        bench.send("r_1", finish=ABORTED)
        bench.send("r_0", "whole", [1], LENGTH)
        assert [o.finish.type for o in await stream.collect() if o.finish] == ["length", "abort"]

    play(test)


def test_abort_of_a_batch_by_its_one_id() -> None:
    """Also when a part of it has ended. Another request is not meant, whatever its id begins with."""

    async def test(bench: Bench) -> None:
        batch = await bench.manager.submit(call(input_ids=[[1], [2], [3]]))
        other = await bench.manager.submit(call(rid="r_10"))
        for _ in range(4):
            await bench.request()
        bench.send("r_0", "a", [1], LENGTH)
        await bench.sync()
        assert bench.manager.abort("r")
        assert await bench.received() == AbortReq(["r_1", "r_2"])
        for rid in ("r_1", "r_2"):
            bench.send(rid, finish=ABORTED)
        bench.send("r_10", "b", [1], LENGTH)
        assert [o.finish.type for o in await batch.collect() if o.finish] == ["length", "abort", "abort"]
        assert [o.finish.type for o in await other.collect() if o.finish] == ["length"]

    play(test)


def test_abort_all() -> None:
    async def test(bench: Bench) -> None:
        streams = [await bench.manager.submit(call(rid=rid)) for rid in "ab"]
        for _ in streams:
            await bench.request()
        bench.manager.abort_all()
        assert await bench.received() == AbortReq(["a", "b"])
        for rid in "ab":
            bench.send(rid, finish=ABORTED)
        for stream in streams:
            assert [o.finish for o in await stream.collect()] == [ABORTED]

    play(test)


def test_an_abort_while_sequences_are_still_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not sent end here; the scheduler hears of the others."""
    monkeypatch.setattr(tokenizer_manager, "SEND_BATCH_TOKENS", 1)

    async def test(bench: Bench) -> None:
        submitting = asyncio.ensure_future(bench.manager.submit(call(rid=["a", "b"], input_ids=[[1], [2]])))
        while not bench.manager.num_unfinished:
            await asyncio.sleep(0)
        bench.manager.abort_all()
        outputs = asyncio.ensure_future((await submitting).collect())
        assert (await bench.request()).rid == "a"
        assert await bench.received() == AbortReq(["a"])
        bench.send("a", finish=ABORTED)
        assert [o.finish for o in await outputs] == [ABORTED, ABORTED]

    play(test)


def test_aborts_wait_for_room_in_a_full_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_manager, "ENDINGS_RETRY_S", 0.001)

    async def test(bench: Bench) -> None:
        streams = [await bench.manager.submit(call(rid)) for rid in "abc"]
        for _ in streams:
            await bench.request()
        send, attempts = bench.manager.replicas[0].outbox.try_send, []

        def full(message: object) -> None:
            attempts.append(message)
            raise ipc.ChannelFull("full")

        monkeypatch.setattr(bench.manager.replicas[0].outbox, "try_send", full)
        for stream in streams:
            await stream.aclose()
        while len(attempts) < 5:
            await asyncio.sleep(0.001)
        bench.send("b", finish=LENGTH)  # it ended by itself
        while bench.manager.num_unfinished == 3:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(bench.manager.replicas[0].outbox, "try_send", send)
        assert await bench.received() == AbortReq(["a", "c"])
        for rid in "ac":
            bench.send(rid, finish=ABORTED)
        await bench.sync()
        assert await bench.nothing_received()

    play(test)


def test_duplicate_ids_are_refused() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        await bench.request()
        with pytest.raises(RequestError, match="'r' is already running"):
            await bench.manager.submit(call())
        bench.send("r", finish=LENGTH)
        await stream.collect()

    play(test)


def test_a_batch_has_an_id_of_its_own() -> None:
    """An abort by it would end the other request, too."""

    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        await bench.request()
        with pytest.raises(RequestError, match="'r' is already running"):
            await bench.manager.submit(call(input_ids=[[1], [2]]))
        bench.send("r", finish=LENGTH)
        await stream.collect()

    play(test)


def test_control_calls() -> None:
    async def test(bench: Bench) -> None:
        work = asyncio.ensure_future(bench.manager.control("flush_cache", {"a": 1}))
        message = await bench.received()
        assert isinstance(message, ControlReq)
        assert (message.kind, message.args) == ("flush_cache", {"a": 1})
        bench.outbox.send(ControlReply("somebody else's"))
        bench.outbox.send(ControlReply(message.id, ok=False, message="busy"))
        reply = await work
        assert (reply.ok, reply.message) == (False, "busy")
        with pytest.raises(RequestError, match=r"did not answer ping within 0\.01") as caught:
            await bench.manager.control("ping", timeout=0.01)
        assert caught.value.status_code == 503
        await bench.received()

    play(test)


def test_information_from_the_scheduler() -> None:
    async def test(bench: Bench) -> None:
        before = bench.manager.last_receive_time
        bench.outbox.send(SchedulerReady({"plan": 1}))
        bench.outbox.send(SchedulerStats(num_running_reqs=3, token_usage=0.5))
        await bench.sync()
        assert bench.manager.scheduler_info == {"plan": 1}
        assert bench.manager.replicas[0].stats.num_running_reqs == 3
        assert bench.manager.last_receive_time > before

    play(test)


def test_a_dead_engine_fails_what_runs_and_what_comes() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        control = asyncio.ensure_future(bench.manager.control("ping"))
        await asyncio.sleep(0)
        bench.manager.mark_unhealthy("the scheduler process died")
        for work in (stream.collect(), control):
            with pytest.raises(RequestError, match="scheduler process died") as caught:
                await work
            assert caught.value.status_code == 500
        with pytest.raises(RequestError, match="not healthy") as caught:
            await bench.manager.submit(call())
        assert caught.value.status_code == 503
        assert bench.manager.status is ServerStatus.UNHEALTHY

    play(test)


def test_an_update_holds_back_a_request_that_was_being_prepared() -> None:
    async def test(bench: Bench) -> None:
        manager, prepare, ready = bench.manager, bench.manager.preparer.prepare, asyncio.Event()

        async def slow(req: GenerateRequest) -> Any:
            await ready.wait()
            prepared = await prepare(req)
            done.set()
            return prepared

        done = asyncio.Event()
        manager.preparer.prepare = slow  # type: ignore[method-assign]
        submitting = asyncio.create_task(manager.submit(call(stream=True)))
        await asyncio.sleep(0)
        manager.weights.under_way = update = asyncio.Event()
        ready.set()
        await done.wait()
        assert await bench.nothing_received()
        assert not manager.num_unfinished
        manager.weights.under_way = None
        update.set()
        stream = await submitting
        request = await bench.request()
        bench.send(request.rid, "a", [4], LENGTH)
        assert len(await stream.collect()) == 1

    play(test)


def test_calls_fail_and_their_sequences_end() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(stream=True))
        request = await bench.request()
        bench.manager.fail_running(RequestError("The weights cannot be used", 503))
        with pytest.raises(RequestError, match="cannot be used"):
            await stream.collect()
        assert isinstance(message := await bench.received(), AbortReq) and message.rids == [request.rid]
        bench.send(request.rid, finish=ABORTED)
        await bench.sync()

    play(test)


def test_drain() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        await bench.request()
        bench.manager.begin_shutdown()
        with pytest.raises(RequestError, match="shutting down") as caught:
            await bench.manager.submit(call("other"))
        assert caught.value.status_code == 503
        drained = asyncio.ensure_future(bench.manager.drain(10))
        await asyncio.sleep(0.05)
        assert not drained.done()
        bench.send("r", "end", [1], LENGTH)
        assert await drained
        assert [o.text for o in await stream.collect()] == ["end"]

    play(test)


def test_drain_ends_what_takes_too_long() -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call())
        await bench.request()
        bench.manager.begin_shutdown()
        assert not await bench.manager.drain(0.02)
        assert await bench.received() == AbortReq(["r"])
        bench.send("r", finish=ABORTED)
        await stream.collect()

    play(test)


@pytest.mark.parametrize("sent_before", [0, 1])
@pytest.mark.parametrize(
    ("error", "expected"), [(ipc.ChannelFull("full"), RequestError), (OverflowError("too big"), OverflowError)]
)
def test_a_failed_send_leaves_nothing_registered(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], sent_before: int
) -> None:
    """Whatever was raised: the ids are free again, what was sent is aborted, and shutdown waits for nothing."""

    async def test(bench: Bench) -> None:
        send = bench.manager.replicas[0].outbox.try_send
        room = sent_before

        def refuse(message: SchedulerInput) -> None:
            nonlocal room
            if isinstance(message, TokenizedGenerateReq):
                room -= 1
                if room < 0:
                    raise error
            send(message)

        monkeypatch.setattr(bench.manager.replicas[0].outbox, "try_send", refuse)
        with pytest.raises(expected) as caught:
            await bench.manager.submit(call(rid=["a", "b"], input_ids=[[1], [2]]))
        if isinstance(caught.value, RequestError):
            assert caught.value.status_code == 503 and "overloaded" in caught.value.message
        assert bench.manager.num_unfinished == sent_before
        if sent_before:
            assert (await bench.request()).rid == "a"
            assert await bench.received() == AbortReq(["a"])
            bench.send("a", finish=ABORTED)
            await bench.sync()
        monkeypatch.setattr(bench.manager.replicas[0].outbox, "try_send", send)
        again = await bench.manager.submit(call(rid=["a", "b"], input_ids=[[1], [2]]))
        for rid in "ab":
            assert (await bench.request()).rid == rid
            bench.send(rid, finish=LENGTH)
        await again.collect()

    play(test)


def test_an_integer_that_no_message_can_carry_is_refused_by_its_name() -> None:
    """Whatever field has it: the bodies of HTTP requests are not the only way in."""

    async def test(bench: Bench) -> None:
        for fields, name in (
            ({"thinking": ThinkingBudget(1 << 70, 1, 2, False)}, "thinking.tokens"),
            ({"thinking": ThinkingBudget(5, -(1 << 70), 2, False)}, "thinking.begin"),
        ):
            with pytest.raises(RequestError, match=f"^{name} must be a 64-bit integer"):
                await bench.manager.submit(call(input_ids=[1, 2], **fields))
            assert bench.manager.num_unfinished == 0

    play(test)


def test_a_caller_cancelled_while_sending_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_manager, "SEND_BATCH_TOKENS", 1)

    async def test(bench: Bench) -> None:
        submitting = asyncio.ensure_future(bench.manager.submit(call(rid=["a", "b", "c"], input_ids=[[1], [2], [3]])))
        while not bench.manager.num_unfinished:
            await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert (await bench.request()).rid == "a"
        assert await bench.received() == AbortReq(["a"])
        bench.send("a", finish=ABORTED)
        await bench.sync()

    play(test)


def test_a_control_call_that_cannot_be_sent_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        def refuse(message: object) -> None:
            raise ipc.ChannelFull("full")

        monkeypatch.setattr(bench.manager.replicas[0].outbox, "try_send", refuse)
        with pytest.raises(RequestError, match="overloaded") as caught:
            await bench.manager.control("ping")
        assert caught.value.status_code == 503 and not bench.manager.replicas[0].replies

    play(test)


def test_long_texts_leave_the_loop_alone() -> None:
    async def test(bench: Bench) -> None:
        ids = await bench.manager.text.encode("word " * 2000)
        assert len(ids) > 1000
        stream = await bench.manager.submit(call(input_ids=None, text="word " * 1000))
        assert (await bench.request()).input_ids.tolist() == await bench.manager.text.encode("word " * 1000)
        bench.send("r", finish=LENGTH)
        await stream.collect()

    assert text_encoder.LONG_TEXT < 5000
    play(test)


def test_metrics() -> None:
    async def test(bench: Bench) -> None:
        metrics = bench.manager.metrics
        assert metrics is not None
        stream = await bench.manager.submit(call())
        await bench.request()
        bench.send("r", "a", [1])
        bench.send("r", "bcd", [2, 3, 4], LENGTH)
        await stream.collect()
        bench.outbox.send(SchedulerStats(num_running_reqs=3, token_usage=0.5))
        await bench.sync()
        families = text_string_to_metric_families(metrics.render().decode())
        samples = [sample for family in families for sample in family.samples]
        labels = {"model_name": "tiny", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        kept = [labels, {**labels, "cache_source": "device"}]
        values = {sample.name: sample.value for sample in samples if sample.labels in kept}
        expected = {
            "sglang:num_running_reqs": 3,
            "sglang:num_queue_reqs": 0,
            "sglang:token_usage": 0.5,
            "sglang:prompt_tokens_total": 3,
            "sglang:generation_tokens_total": 4,
            "sglang:cached_tokens_total": 1,
            "sglang:num_requests_total": 1,
            "sglang:num_aborted_requests_total": 0,
            "sglang:time_to_first_token_seconds_count": 1,
            "sglang:inter_token_latency_seconds_count": 3,
            "sglang:queue_time_seconds_count": 1,
            "sglang:e2e_request_latency_seconds_count": 1,
        }
        assert {name: values.get(name) for name in expected} == expected
        buckets = [s.value for s in samples if s.name == "sglang:inter_token_latency_seconds_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 3

    play(test, enable_metrics=True, served_model_name="tiny")


def test_metrics_of_a_whole_answer() -> None:
    """Its tokens come together, with the time of the first."""

    async def test(bench: Bench) -> None:
        metrics = bench.manager.metrics
        assert metrics is not None
        stream = await bench.manager.submit(call())
        await bench.request()
        begun = stream.created_time + 0.001
        bench.send("r", "abcd", [1, 2, 3, 4], LENGTH, first_token_time=begun)
        await asyncio.gather(stream.collect(), asyncio.sleep(0.05))
        assert metrics.first_token.total == pytest.approx(0.001) and sum(metrics.first_token.counts) == 1
        later = metrics.request.total - metrics.first_token.total
        assert metrics.inter_token.total == pytest.approx(later) and sum(metrics.inter_token.counts) == 3
        assert metrics.generation_tokens == 4

    play(test, enable_metrics=True)


def test_the_log_has_what_was_asked_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        stream = await bench.manager.submit(call(text="What is 15+27?", input_ids=None))
        await bench.request()
        bench.send("r", "It is ", [1])
        bench.send("r", "42.", [2, 3, 4], LENGTH)
        await stream.collect()

    with caplog.at_level(logging.INFO):
        play(test, log_requests=True, log_requests_level=2)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]
    assert "'prompt': 'What is 15+27?'" in lines[0]
    assert lines[1].startswith("Finished: rid=r, ") and lines[1].endswith("reason=length, output='It is 42.'")


def test_long_texts_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another client's text is tokenized between them; and no more of them than is enough."""
    bench = Bench()
    lengths: list[int] = []
    encode = bench.manager.text.encode

    async def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return await encode(text, add_special_tokens)

    monkeypatch.setattr(bench.manager.text, "encode", counted)
    text = "one two three " * 1000
    exact = asyncio.run(bench.manager.text.count_tokens(text))
    assert lengths == [len(text)]
    monkeypatch.setattr(text_encoder, "EXACT_COUNT_CHARS", 1000)
    monkeypatch.setattr(request_preparation, "PIECE_CHARS", 1400)
    assert abs(asyncio.run(bench.manager.text.count_tokens(text)) - exact) <= 10
    assert lengths[1:] == [1400] * 10
    assert asyncio.run(bench.manager.text.count_tokens(text, enough=exact // 2)) > exact // 2
    assert len(lengths) <= 1 + 10 + 6
    bench.manager.close()


def test_whole_outputs_are_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    body = ParseCallsRequest(text=f"so: {call * 50} done", tools=[tool], tool_call_parser="hermes")
    whole = asyncio.run(output_formats.parse_calls(bench.manager, ModelFormats(), body))
    assert len(whole["calls"]) == 50 and whole["normal_text"] == "so: done"
    monkeypatch.setattr(output_formats, "PARSED_PIECE", 17)
    pieces = []
    in_thread = bench.manager.text.in_thread

    async def counted(size: int, function: Any, *texts: str) -> Any:
        assert size == len(body.text)
        pieces.extend(texts)
        return await in_thread(size, function, *texts)

    monkeypatch.setattr(bench.manager.text, "in_thread", counted)
    assert asyncio.run(output_formats.parse_calls(bench.manager, ModelFormats(), body)) == whole
    assert len(pieces) == -(-len(body.text) // 17)
    bench.manager.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_ids_logprob": list(range(500)), "return_logprob": True},
        {"sampling_params": {"max_new_tokens": 1, "json_schema": '{"description": "' + "x" * 10_000 + '"}'}},
    ],
)
def test_many_short_prompts_let_others_run(options: dict[str, Any]) -> None:
    """While a call of many sequences is prepared and sent, other callbacks run every few of them."""

    async def test(bench: Bench) -> None:
        turns, counts = 0, list[int]()

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.ensure_future(others())
        prepare, send = bench.manager.preparer.prepare, bench.manager._send_sequences

        async def counted(work: Callable[..., Awaitable[Any]], *args: Any) -> Any:
            before = turns
            result = await work(*args)
            counts.append(turns - before)
            return result

        bench.manager.preparer.prepare = partial(counted, prepare)  # type: ignore[method-assign]
        bench.manager._send_sequences = partial(counted, send)  # type: ignore[method-assign]
        params = {"sampling_params": {"max_new_tokens": 1}} | options
        stream = await bench.manager.submit(GenerateRequest(input_ids=[[5]] * 640, **params))
        running.cancel()
        assert len(counts) == 2 and min(counts) >= 9
        bench.manager.fail_all(RequestError("the test is over"))
        await stream.aclose()

    play(test)
