"""A front with two replicas whose other ends the test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.managers.front.session_affinity import session_id
from sglang.srt.managers.front.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.managers.wire import ipc
from sglang.srt.managers.wire.io_struct import (
    AbortReq,
    BatchStrOut,
    ControlReply,
    ControlReq,
    FinishReason,
    SchedulerInput,
    TokenizedGenerateReq,
    TokenMeta,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer


class Pair:
    def __init__(self, **options: Any) -> None:
        args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, dp_size=2, **options)
        self.ports = ipc.Ports.create_many(2)
        self.manager = TokenizerManager(args, ModelConfig.from_server_args(args), self.ports, load_tokenizer(args))
        self.inboxes = [ipc.scheduler_inbox(ports) for ports in self.ports]
        self.outboxes = [ipc.detokenizer_outbox(ports) for ports in self.ports]

    async def received(self, replica: int) -> SchedulerInput:
        while (message := self.inboxes[replica].recv_nowait()) is None:
            await asyncio.sleep(0.001)
        return message

    def answer(self, replica: int, rid: str) -> None:
        finish = FinishReason("length", length=1)
        meta = TokenMeta(prompt_tokens=2, completion_tokens=1)
        self.outboxes[replica].send(
            BatchStrOut(rids=[rid], new_text=["x"], new_ids=[[7]], finish=[finish], meta=[meta], logprobs=[None])
        )

    @property
    def loads(self) -> list[tuple[int, int]]:
        return [(replica.load.num_requests, replica.load.num_tokens) for replica in self.manager.replicas]

    def close(self) -> None:
        self.manager.close()
        for channel in (*self.inboxes, *self.outboxes):
            channel.close()
        self.ports[0].remove()


def play(test: Callable[[Pair], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        pair = Pair(**options)
        try:
            pair.manager.attach()
            pair.manager.mark_up()
            await asyncio.wait_for(test(pair), 300)
        finally:
            pair.close()

    asyncio.run(main())


def call(rid: str, replica: int | None = None) -> GenerateRequest:
    params = {"max_new_tokens": 1}
    return GenerateRequest(input_ids=[1, 2], sampling_params=params, rid=rid, replica=replica)


def test_the_load_is_of_what_runs() -> None:
    async def test(pair: Pair) -> None:
        streams = {rid: await pair.manager.submit(call(rid)) for rid in "abc"}
        assert pair.loads == [(2, 4), (1, 2)]
        requests = [await pair.received(0), await pair.received(1), await pair.received(0)]
        assert [request.rid for request in requests if isinstance(request, TokenizedGenerateReq)] == ["a", "b", "c"]
        pair.answer(1, "b")
        await streams["b"].collect()
        assert pair.loads == [(2, 4), (0, 0)]
        pair.manager.abort("c")
        assert await pair.received(0) == AbortReq(["c"])
        for rid in "ac":
            pair.answer(0, rid)
            await streams[rid].collect()
        assert pair.loads == [(0, 0), (0, 0)]

    play(test)


def test_a_replica_that_is_lost_takes_its_own_calls_with_it() -> None:
    async def test(pair: Pair) -> None:
        lost, kept = await pair.manager.submit(call("lost", 0)), await pair.manager.submit(call("kept", 1))
        flush = asyncio.ensure_future(pair.manager.control("flush_cache"))
        question = [await pair.received(1), await pair.received(1)][1]
        assert isinstance(question, ControlReq)
        assert pair.manager.lose_replica(0, "it died")
        with pytest.raises(RequestError, match=r"Replica 0 .* failed \(it died\)") as caught:
            await lost.collect()
        assert caught.value.status_code == 503 and pair.loads == [(0, 0), (1, 2)]
        assert not flush.done()
        pair.outboxes[1].send(ControlReply(question.id))
        assert (await flush).ok
        pair.answer(0, "kept")  # what was on its way from the other one
        await asyncio.sleep(0.02)
        pair.answer(1, "kept")
        assert [output.new_ids for output in await kept.collect()] == [[7]]
        with pytest.raises(RequestError, match="Replica 0 of the server has failed") as caught:
            await pair.manager.submit(call("pinned", 0))
        assert caught.value.status_code == 503 and pair.manager.num_unfinished == 0
        assert pair.manager.replica_for([1, 2], wanted=0) == 1
        assert pair.manager.status is ServerStatus.UP

    play(test)


def test_sessions_stay_until_their_replica_is_lost() -> None:
    async def test(pair: Pair) -> None:
        async def replica_of(rid: str, session: bytes | None) -> int:
            token = session_id.set(session)
            try:
                stream = await pair.manager.submit(call(rid))
            finally:
                session_id.reset(token)
            index = 0 if pair.loads[0][0] else 1
            message = await pair.received(index)
            assert isinstance(message, TokenizedGenerateReq) and (message.rid, message.session) == (rid, session)
            pair.answer(index, rid)
            await stream.collect()
            return index

        turns = [b"a", b"b", b"b", b"a", b"a", b"b"]
        assert [await replica_of(f"t{turn}", name) for turn, name in enumerate(turns)] == [0, 1, 1, 0, 0, 1]
        assert pair.manager.lose_replica(0, "it died")
        assert [await replica_of(f"l{turn}", name) for turn, name in enumerate(turns)] == [1] * 6

    play(test, load_balance_method="prefix_affinity")


def test_without_replicas_the_engine_is_gone() -> None:
    async def test(pair: Pair) -> None:
        stream = await pair.manager.submit(call("last", 1))
        control = asyncio.ensure_future(pair.manager.control("ping"))
        await asyncio.sleep(0)
        assert pair.manager.lose_replica(0, "it died")
        assert not pair.manager.lose_replica(1, "that one, too")
        for work in (stream.collect(), control):
            with pytest.raises(RequestError, match="it died|that one, too"):
                await work
        assert pair.manager.status is ServerStatus.UNHEALTHY
        with pytest.raises(RequestError, match="not healthy"):
            await pair.manager.submit(call("late"))

    play(test)


@pytest.mark.parametrize(("replies", "times"), [((False, False), 0), ((True, False), 1)])
def test_prefixes_are_forgotten_where_a_cache_was_flushed(
    replies: tuple[bool, bool], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(pair: Pair) -> None:
        forgotten = list[bool]()
        monkeypatch.setattr(pair.manager._router, "forget_prefixes", lambda: forgotten.append(True))
        flush = asyncio.ensure_future(pair.manager.control("flush_cache"))
        for replica, ok in enumerate(replies):
            question = await pair.received(replica)
            assert isinstance(question, ControlReq)
            pair.outboxes[replica].send(ControlReply(question.id, ok, "busy"))
        assert not (await flush).ok and len(forgotten) == times

    play(test)


def test_a_refusal_says_whose_it_is() -> None:
    async def test(pair: Pair) -> None:
        flush = asyncio.ensure_future(pair.manager.control("flush_cache"))
        for replica, ok in enumerate((True, False)):
            question = await pair.received(replica)
            assert isinstance(question, ControlReq)
            pair.outboxes[replica].send(ControlReply(question.id, ok, "" if ok else "busy"))
        reply = await flush
        assert not reply.ok and reply.message == "Replica 1: busy"

    play(test)


@pytest.mark.parametrize("undone", [True, False])
def test_what_some_replicas_did_is_undone_where_others_refuse(undone: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test(pair: Pair) -> None:
        attach = asyncio.ensure_future(
            pair.manager.control("attach_storage", {"backend": "file"}, undo=Undo("detach_storage", {"undo": True}))
        )
        for replica, ok in ((0, True), (1, False)):
            question = await pair.received(replica)
            assert isinstance(question, ControlReq) and question.kind == "attach_storage"
            pair.outboxes[replica].send(ControlReply(question.id, ok, "" if ok else "it is busy"))
        question = await pair.received(0)
        assert isinstance(question, ControlReq) and question.kind == "detach_storage" and not attach.done()
        assert question.args == {"undo": True}
        pair.outboxes[0].send(ControlReply(question.id, undone, "" if undone else "a request runs"))
        reply = await attach
        assert not reply.ok and reply.message == "Replica 1: it is busy"
        await asyncio.sleep(0.03)
        assert pair.inboxes[1].recv_nowait() is None

    play(test)
    assert ("(a request runs)" in caplog.text) is not undone


def test_what_some_replicas_did_is_undone_where_others_are_late() -> None:
    """A late one may follow the call yet, so it hears both."""

    async def test(pair: Pair) -> None:
        undo = Undo("detach_storage", {"undo": True})
        attach = asyncio.ensure_future(pair.manager.control("attach_storage", {}, 1.0, undo))
        question = await pair.received(0)
        assert isinstance(question, ControlReq)
        pair.outboxes[0].send(ControlReply(question.id))
        for replica, kinds in ((0, ["detach_storage"]), (1, ["attach_storage", "detach_storage"])):
            for kind in kinds:
                question = await pair.received(replica)
                assert isinstance(question, ControlReq) and question.kind == kind
        with pytest.raises(RequestError, match="did not answer attach_storage"):
            await attach

    play(test)


def test_what_one_replica_did_is_undone_where_another_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pair: Pair) -> None:
        def full(message: object) -> None:
            raise ipc.ChannelFull

        monkeypatch.setattr(pair.manager.replicas[1].outbox, "try_send", full)
        undo = Undo("detach_storage", {"undo": True})
        attach = asyncio.ensure_future(pair.manager.control("attach_storage", {}, undo=undo))
        for kind in ("attach_storage", "detach_storage"):
            question = await pair.received(0)
            assert isinstance(question, ControlReq) and question.kind == kind
            pair.outboxes[0].send(ControlReply(question.id))
        reply = await attach
        assert not reply.ok and reply.message.startswith("Replica 1: The server is overloaded")

    play(test)
