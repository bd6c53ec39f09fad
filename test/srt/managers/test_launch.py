"""Start, failure and end of the processes, with a scheduler that needs no model."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.environ import Environment
from sglang.srt.errors import UserError
from sglang.srt.managers import engine_processes, launch
from sglang.srt.managers.child import ERROR
from sglang.srt.managers.engine_processes import EngineError, EngineProcesses, _Child
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.managers.front.native_output import native_results
from sglang.srt.managers.launch import EngineHandle, launch_engine
from sglang.srt.managers.reap import REAP_LIMIT_S
from sglang.srt.server_args import ServerArgs

START_S = 300.0
PATIENCE_S = 300.0
"""For what comes at once where the machine has nothing else to do."""
USER_ERROR, CRASH, STOPPED = 13, 14, 15
"""--max-total-tokens with which the fake scheduler fails to start."""


@pytest.fixture(autouse=True)
def fake_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SCHEDULER_ENTRY", "srt.managers.fake_scheduler:run_scheduler")


def start(**flags: Any) -> EngineHandle:
    handle = launch_engine(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **flags))
    handle.wait_ready(START_S)
    return handle


@pytest.fixture
def engine() -> Iterator[EngineHandle]:
    handle = start()
    yield handle
    handle.shutdown()


def alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + PATIENCE_S
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(alive, pids))


def run_call(engine: EngineHandle, **fields: Any) -> Any:
    async def main() -> Any:
        engine.manager.attach()
        try:
            return await asyncio.wait_for(native_results(engine.manager, GenerateRequest(**fields)), PATIENCE_S)
        finally:
            engine.manager.detach()

    return asyncio.run(main())


def test_from_text_to_text(engine: EngineHandle) -> None:
    text = "naïve 😀 text "
    for _ in range(2):
        result = run_call(engine, text=text, sampling_params={"max_new_tokens": 500})
        assert result["text"].startswith(text * 3)
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 500}
    assert engine.manager.scheduler_info == {"fake": True}


def test_shutdown_leaves_nothing() -> None:
    handle = start()
    pids = [pid for pid in handle.process_ids.values() if pid is not None]
    directory = handle._ports[0].root
    assert len(pids) == 2
    assert os.path.isdir(directory)
    handle.shutdown()
    handle.shutdown()
    assert not any(map(alive, pids))
    assert not os.path.exists(directory)
    assert handle.failure is None


def test_processes_that_stay_are_killed_before_the_program_is_ended() -> None:
    """Where a signal comes before the server has the handle, this is called as the program exits: what the guard then
    ends would leave them behind."""
    limit_s = inspect.signature(EngineHandle.shutdown).parameters["limit_s"].default
    assert limit_s + REAP_LIMIT_S < Environment.SGLANG_END_TIMEOUT.default


def test_tensor_parallel_ranks_are_processes_of_their_own() -> None:
    """The fake one binds the same socket in each rank, so only the names are looked at."""
    handle = launch_engine(
        ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, tp_size=2, max_total_tokens=USER_ERROR)
    )
    assert list(handle.process_ids) == ["scheduler TP0", "scheduler TP1", "detokenizer"]
    handle.shutdown(limit_s=0)


def test_a_user_error_in_a_child_is_one_here() -> None:
    with pytest.raises(UserError, match="13 tokens are too few"):
        start(max_total_tokens=USER_ERROR)


def test_a_crash_at_start_carries_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    handle = launch_engine(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, max_total_tokens=CRASH))
    pids = [pid for pid in handle.process_ids.values() if pid is not None]
    with pytest.raises(EngineError, match="scheduler process failed: RuntimeError: no luck at start-up") as caught:
        handle.wait_ready(START_S)
    assert "in run_scheduler" in caught.value.details
    assert "in run_scheduler" in caplog.text
    wait_until_gone(pids)


def test_a_process_that_stops_while_it_starts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "START_SILENCE_S", 10.0)
    handle = launch_engine(
        ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, max_total_tokens=STOPPED, watchdog_timeout=10.0)
    )
    pids = [pid for pid in handle.process_ids.values() if pid is not None]
    with pytest.raises(EngineError, match="the scheduler process does not answer"):
        handle.wait_ready(START_S)
    wait_until_gone(pids)


def test_a_time_limit_for_the_start() -> None:
    handle = launch_engine(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH))
    with pytest.raises(EngineError, match="did not start within 0 seconds"):
        handle.wait_ready(0.0)


def test_a_wrong_model_is_known_at_once() -> None:
    with pytest.raises(UserError, match="does not exist"):
        launch_engine(ServerArgs.from_kwargs(model_path="/no/such/model"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be in"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": "warm"}, "temperature: expected"),
        ({"stop_regex": ["("]}, "stop_regex"),
        ({"logit_bias": {"999999": 1}}, "logit_bias keys must be token ids"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
        ({"regex": "(ab"}, "invalid regex"),
        pytest.param({"json_schema": {"type": "no such type"}}, "json_schema", marks=pytest.mark.thorough),
    ],
)
def test_wrong_preferred_sampling_params_are_known_at_once(params: dict[str, Any], message: str) -> None:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, preferred_sampling_params=params)
    with pytest.raises(UserError, match="--preferred-sampling-params: .*" + message):
        launch_engine(args)


def test_preferred_grammars_need_what_compiles_them() -> None:
    args = ServerArgs.from_kwargs(
        model_path=DEFAULT_MODEL_PATH, preferred_sampling_params={"regex": "a"}, grammar_backend="none"
    )
    with pytest.raises(UserError, match="--preferred-sampling-params: a regex needs .*--grammar-backend"):
        launch_engine(args)


@pytest.mark.parametrize(
    ("how", "message"),
    [("crash", "scheduler process failed: RuntimeError: the fake scheduler crashed"), ("die", "killed by SIGKILL")],
)
def test_death_while_running_is_reported(how: str, message: str) -> None:
    handle = start()

    async def main() -> None:
        handle.manager.attach()
        loop = asyncio.get_running_loop()

        def fail(replica: int, message: str) -> None:
            loop.call_soon_threadsafe(handle.manager.lose_replica, replica, message)

        handle.watch(fail)
        req = GenerateRequest(input_ids=[1], extra_key=how)
        with pytest.raises(RequestError, match="scheduler process"):
            await asyncio.wait_for(native_results(handle.manager, req), PATIENCE_S)
        handle.manager.close()

    asyncio.run(main())
    assert handle.failure is not None
    assert message in handle.failure
    late: queue.Queue[tuple[int, str]] = queue.Queue()
    handle.watch(lambda *failure: late.put(failure))  # told at once
    assert late.get(timeout=PATIENCE_S) == (0, handle.failure)
    handle.shutdown()


def test_signals_to_the_group_leave_children_to_the_parent(engine: EngineHandle) -> None:
    for pid in engine.process_ids.values():
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert run_call(engine, input_ids=[1], sampling_params={"max_new_tokens": 2})["output_ids"] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from sglang.srt.managers import launch\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "if __name__ == '__main__':\n"
        f"    sys.path[:] = {sys.path!r}\n"
        "    launch.SCHEDULER_ENTRY = 'srt.managers.fake_scheduler:run_scheduler'\n"
        f"    handle = launch.launch_engine(ServerArgs.from_kwargs(model_path={DEFAULT_MODEL_PATH!r}))\n"
        "    handle.wait_ready(300)\n"
        "    print(handle._ports[0].root, *handle.process_ids.values(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        directory, *pids = parent.stdout.readline().split()
        assert os.path.isdir(directory)
        assert all(alive(int(pid)) for pid in pids)
        parent.send_signal(number)
    wait_until_gone([int(pid) for pid in pids])
    assert not os.path.exists(directory)


def no_processes(told: Callable[[], None] = lambda: None) -> EngineProcesses:
    return EngineProcesses(60.0, told)


def test_who_dies_without_a_word_began_it_however_late_that_is_known() -> None:
    """The end of a process may come to the parent's ears behind the error that another one met because of it."""
    handle = no_processes()
    ends = {name: multiprocessing.Pipe() for name in ("scheduler PP0", "scheduler PP1", "detokenizer")}
    killed = SimpleNamespace(join=lambda timeout: None, exitcode=-signal.SIGKILL)
    by_pipe = {ours: _Child(name, killed, ours) for name, (ours, _) in ends.items()}
    ends["scheduler PP0"][1].send_bytes(ERROR + b"RuntimeError: Connection reset by peer")
    failures = handle._listen(by_pipe, 10.0)
    assert [str(failure) for failure in failures] == [
        "the scheduler PP0 process failed: RuntimeError: Connection reset by peer"
    ]
    ends["scheduler PP1"][1].close()
    cause = handle._causes(by_pipe, failures)[0]
    assert str(cause) == "the scheduler PP1 process died (killed by SIGKILL)"


GLOO = b"Traceback (most recent call last):\n  File ...\nRuntimeError: [pair.cc:553] Connection closed by peer [::1]:5."


def watched(*words: tuple[str, bytes | None]) -> EngineProcesses:
    """Processes with these last words, None for one that was killed, after their monitor has ended."""
    handle = no_processes()
    for name, last_words in words:
        ours, theirs = multiprocessing.Pipe()
        killed: Any = SimpleNamespace(
            join=lambda timeout: None, exitcode=-signal.SIGKILL, pid=None, is_alive=lambda: False
        )
        handle._children.append(_Child(name, killed, ours))
        if last_words is not None:
            theirs.send_bytes(ERROR + last_words)
        theirs.close()
    handle._watch_children()
    return handle


def test_the_cause_is_named_first_and_what_others_met_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that has lost another has nothing to tell that its traceback would add."""
    handle = watched(("scheduler PP0", GLOO), ("scheduler PP1", None), ("detokenizer", None))
    assert str(handle.failure) == "the scheduler PP1 process died (killed by SIGKILL)"
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines[0] == str(handle.failure)
    assert "Then the scheduler PP0 process lost its connection to another rank" in lines[1:]
    assert "Traceback" not in "".join(lines)


def test_an_error_of_its_own_comes_before_lost_connections(caplog: pytest.LogCaptureFixture) -> None:
    handle = watched(("scheduler PP0", GLOO), ("scheduler PP1", b"Traceback ...\nValueError: a bug"))
    assert str(handle.failure) == "the scheduler PP1 process failed: ValueError: a bug"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors[0].endswith("Traceback ...\nValueError: a bug") and "Traceback" not in "".join(errors[1:])


def test_children_that_end_because_they_were_told_have_not_died(caplog: pytest.LogCaptureFixture) -> None:
    """The monitor may hear of one before all have ended, and of others while it asks for the cause."""
    told: list[bool] = []
    handle = no_processes(lambda: told.append(True))

    def join(timeout: float) -> None:
        handle._closing = True  # the parent ends all, and this one is the first

    pipes = [multiprocessing.Pipe() for _ in range(2)]
    ended: Any = SimpleNamespace(join=join, exitcode=0, pid=None)
    handle._children = [_Child(f"scheduler PP{i}", ended, ours) for i, (ours, _) in enumerate(pipes)]
    for _, theirs in pipes:
        theirs.close()
    handle._watch_children()
    assert handle.failure is None and not told
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_all_replicas_are_told_to_end_before_one_is_waited_for() -> None:
    events: list[tuple[str, int]] = []

    class Replica:
        def __init__(self, index: int) -> None:
            self.index = index

        def tell_end(self, limit_s: float) -> None:
            events.append(("told", self.index))

        def end(self, limit_s: float) -> None:
            events.append(("ended", self.index))

    handle = EngineHandle.__new__(EngineHandle)
    handle._closed, handle._replicas = False, [Replica(index) for index in range(3)]
    handle._disconnect, handle._ports = (lambda: None), [SimpleNamespace(remove=lambda: None)]
    handle.shutdown(1.0)
    assert events == [(what, index) for what in ("told", "ended") for index in range(3)]
