from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.managers.scheduler.scheduler_process import RECV_BYTES, SchedulerProcess
from sglang.srt.managers.wire import ipc, left_behind
from sglang.srt.managers.wire.io_struct import AbortReq, ControlReply, ControlReq, SchedulerInput, TokenizedGenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import sent_tensors


@pytest.fixture
def ports() -> Iterator[ipc.Ports]:
    ports = ipc.Ports.create()
    yield ports
    ports.remove()


def request(rid: str, **params: object) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(rid=rid, input_ids=np.array([1, 2], np.int32), sampling_params=SamplingParams(**params))  # type: ignore[arg-type]


def test_messages_arrive_in_order_and_whole(ports: ipc.Ports) -> None:
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.tokenizer_outbox(ports)
    sent: list[SchedulerInput] = [
        request("a", stop=["x"], top_p=0.5),
        AbortReq(["a"]),
        AbortReq(abort_all=True),
        ControlReq("1", "ping", {"k": [1]}),
    ]
    for message in sent:
        outbox.send(message)
    received = [inbox.recv() for _ in sent]
    assert repr(received) == repr(sent)
    assert inbox.recv_nowait() is None
    assert not inbox.poll(0.0)
    outbox.send(AbortReq(["b"]))
    assert inbox.poll(5.0)
    assert list(inbox.drain()) == [AbortReq(["b"])]
    inbox.close()
    outbox.close()


def test_a_step_takes_a_bounded_size_of_messages(ports: ipc.Ports) -> None:
    """The samples of one call may be 64 MB of prompts, which every rank decodes while running requests wait."""
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.tokenizer_outbox(ports)
    process: Any = SchedulerProcess.__new__(SchedulerProcess)
    process.inbox, process.leader, process.decisions = inbox, True, []
    process.grammar_queue = SimpleNamespace(decisions=list)
    process.timeouts = SimpleNamespace(overdue=lambda scheduler: [])
    process.scheduler = SimpleNamespace(idle=False)
    prompt, count = np.zeros(RECV_BYTES // 8, np.int32), 7
    for number in range(count):
        message = TokenizedGenerateReq(rid=str(number), input_ids=prompt, sampling_params=SamplingParams())
        outbox.send(message)
    outbox.send(AbortReq(["0"]))
    taken: list[list[Any]] = []
    while sum(map(len, taken)) <= count:
        assert inbox.poll(5.0)
        taken.append(process.receive())
    assert max(map(len, taken)) <= 3 and taken[-1][-1] == AbortReq(["0"])
    inbox.close()
    outbox.close()


def test_a_writer_may_come_before_the_reader(ports: ipc.Ports) -> None:
    outbox = ipc.tokenizer_outbox(ports)
    outbox.send(AbortReq(["early"]))
    inbox = ipc.scheduler_inbox(ports)
    assert inbox.recv() == AbortReq(["early"])
    inbox.close()
    outbox.close()


def test_only_the_user_may_enter(ports: ipc.Ports) -> None:
    assert stat.S_IMODE(os.stat(ports.directory).st_mode) == 0o700
    ports.remove()
    assert not os.path.exists(ports.directory)


def test_a_foreign_message_is_refused(ports: ipc.Ports) -> None:
    inbox = ipc.scheduler_inbox(ports)
    outbox: ipc.Sender[object] = ipc.Sender(ports.scheduler_input)
    outbox.send({"type": "Nonsense"})
    with pytest.raises(msgspec.ValidationError):
        inbox.recv()
    inbox.close()
    outbox.close()


def test_a_full_channel_refuses_instead_of_growing(ports: ipc.Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "HIGH_WATER_MARK", 10)
    outbox: ipc.Sender[SchedulerInput] = ipc.Sender(ports.scheduler_input, timeout_s=0.01)
    with pytest.raises(ipc.ChannelFull):
        for _ in range(100):
            outbox.try_send(AbortReq(["x"]))
    with pytest.raises(ipc.ChannelFull):
        outbox.send(AbortReq(["x"]))
    ipc.scheduler_inbox(ports).close()  # otherwise the sender lingers
    outbox.close()


def test_event_loop_delivery(ports: ipc.Ports) -> None:
    """More messages than one turn handles, an exception in the handler, and messages before and after attaching."""
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.tokenizer_outbox(ports)
    count = 3 * ipc.DRAIN_BATCH
    seen: list[str] = []
    errors: list[object] = []

    def handle(message: SchedulerInput) -> None:
        assert isinstance(message, AbortReq)
        if message.rids == ["5"]:
            raise RuntimeError("once")
        seen.extend(message.rids)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        for i in range(count):
            outbox.send(AbortReq([str(i)]))
        inbox.attach(handle)
        while len(seen) < count - 1:
            await asyncio.sleep(0.001)
        outbox.send(AbortReq(["last"]))
        while seen[-1] != "last":
            await asyncio.sleep(0.001)
        inbox.close()

    asyncio.run(asyncio.wait_for(main(), 300))
    assert seen == [str(i) for i in range(count) if i != 5] + ["last"]
    assert [str(error) for error in errors] == ["once"]
    outbox.close()


def test_the_event_loop_reads_few_bytes_at_once(ports: ipc.Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "DRAIN_BYTES", 3500)
    inbox, outbox = ipc.scheduler_inbox(ports), ipc.tokenizer_outbox(ports)
    turn, turns = 0, list[int]()

    async def main() -> None:
        nonlocal turn
        for _ in range(20):
            outbox.send(AbortReq(["r" * 1000]))
        assert inbox.poll(20)
        inbox.attach(lambda _: turns.append(turn))
        while len(turns) < 20:
            turn += 1
            await asyncio.sleep(0)
        inbox.close()

    asyncio.run(asyncio.wait_for(main(), 300))
    assert max(map(turns.count, turns)) <= 4
    outbox.close()


def test_channels_between_machines_need_the_key_of_the_replica(ports: ipc.Ports) -> None:
    """Over TCP, both ways, whoever comes first; who does not know the key is not heard."""
    front, keys = ports.with_tcp_addresses("127.0.0.1", ipc.free_ports("127.0.0.1", 2))
    replica = front.on_other_machine(keys)
    stranger, other_keys = ports.with_tcp_addresses("127.0.0.1", ipc.free_ports("127.0.0.1", 2))
    assert keys.secret is not None and keys.secret not in repr(front)
    false = replace(front, keys=stranger.keys)
    to_scheduler, from_stranger = ipc.tokenizer_outbox(front), ipc.tokenizer_outbox(false)
    from_stranger.try_send(AbortReq(["of a stranger"]))
    to_scheduler.try_send(AbortReq(["early"]))
    inbox, outbox, answers = ipc.scheduler_inbox(replica), ipc.detokenizer_outbox(replica), ipc.tokenizer_inbox(front)
    assert inbox.recv() == AbortReq(["early"])
    outbox.send(ControlReply("1"))
    assert answers.recv() == ControlReply("1")
    to_scheduler.send(AbortReq(["late"]))
    assert inbox.recv() == AbortReq(["late"]) and not inbox.poll(0.2)
    for channel in (to_scheduler, from_stranger, inbox, outbox, answers):
        channel.close()
    replica.remove()
    assert not os.path.exists(replica.directory) and os.path.exists(ports.directory)
    assert other_keys.public != keys.public


HOLDER = """
import os, sys
from sglang.srt.managers.wire.ipc import Ports
ports = Ports.create_many(2)[0]
print(ports.root, ports.shared_arrays, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_server_has_left_is_removed_by_the_next(ports: ipc.Ports) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    left = [Path(each) for each in holder.stdout.readline().split()]
    ipc.Ports.create().remove()
    assert all(each.is_dir() for each in left)  # it lives
    holder.kill()
    holder.wait()
    assert all(each.is_dir() for each in left)
    ipc.Ports.create().remove()
    assert not any(each.exists() for each in left)
    assert Path(ports.root).is_dir() and Path(ports.shared_arrays).is_dir()  # of this process
    holder.communicate()


def test_sent_tensors_of_a_process_that_has_ended_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"{sent_tensors.PREFIX}{pid}-test" for pid in (ended.pid, ended.pid, os.getpid())]
    files = [sent_tensors.FOLDER / f"{name}{number}" for number, name in enumerate(names)]
    try:
        for number, file in enumerate(files):
            file.touch()
            if number != 1:  # the second one is young
                os.utime(file, (0, 0))
        left_behind.remove_left(None)
        assert [file.exists() for file in files] == [False, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)
