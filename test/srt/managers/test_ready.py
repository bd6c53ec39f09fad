"""A server says that it is ready only once main memory is page-locked: what the GPU is asked for meanwhile waits. What
compiles grammars begins to load before the model, and nothing waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.child import READY
from sglang.srt.managers.scheduler import scheduler_process
from sglang.srt.mem_cache import copy_engine
from sglang.srt.mem_cache.copy_engine import ThreadedCopies
from sglang.srt.server_args import ServerArgs


@pytest.mark.parametrize("fails", [False, True])
def test_waits_until_all_threads_are_prepared(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    class Preparing:
        def __init__(self, *args: Any, **more: Any) -> None:
            pass

        def warm_up(self, pools: Any) -> None:
            begun.release()
            assert go_on.acquire(timeout=300)
            if fails:
                raise OSError("no memory")

    monkeypatch.setattr(copy_engine, "Copier", Preparing)
    copies = ThreadedCopies([], "cpu", num_threads=2)
    assert copies.wait_prepared(), "nothing was started"
    copies.start()
    assert all(begun.acquire(timeout=300) for _ in range(2))
    go_on.release()
    assert not copies.wait_prepared(0.01), "one of them is not"
    go_on.release()
    assert copies.wait_prepared(60) and copies.wait_prepared(60)
    assert (copies.ready, copies.broken) == (not fails, fails)


@pytest.mark.parametrize("has_copies", [False, True])
def test_is_ready_behind_the_copies(monkeypatch: pytest.MonkeyPatch, has_copies: bool) -> None:
    said: list[str] = []
    copies = SimpleNamespace(wait_prepared=lambda seconds: said.append("prepared"))
    plan = SimpleNamespace(describe=dict, expert_slots=None)
    runner = SimpleNamespace(copies=copies if has_copies else None, media=None, plan=plan)
    process = SimpleNamespace(
        send_output=lambda message: said.append("told"),
        grammars=SimpleNamespace(warm_up=lambda: None),
        run_forever=lambda: said.append("serves"),
    )
    monkeypatch.setattr(scheduler_process, "create_plan", lambda *call: plan)
    monkeypatch.setattr(scheduler_process, "create_grammars", lambda *call: said.append("grammars"))
    monkeypatch.setattr(scheduler_process, "load_runner", lambda *call, **waits: said.append("loads") or runner)
    monkeypatch.setattr(scheduler_process, "compiling_beside", lambda *call: None)
    monkeypatch.setattr(scheduler_process, "rendezvous", lambda *call: None)
    monkeypatch.setattr(scheduler_process, "load_tokenizer", lambda *call: None)
    monkeypatch.setattr(scheduler_process, "SchedulerProcess", lambda *call: process)
    monkeypatch.setattr(scheduler_process.late_compiles, "watch", lambda: None)
    monkeypatch.setattr(scheduler_process.gc, "freeze", lambda: None)
    args = cast(Any, SimpleNamespace(skip_server_warmup=True, is_embedding=False))
    ports = cast(Any, SimpleNamespace(directory=Path(), num_replicas=1, replica=0, root=""))
    pipe = cast(Any, SimpleNamespace(send_bytes=lambda data: said.append(data.decode())))
    scheduler_process.run_scheduler(args, ports, 0, pipe)
    assert said == ["grammars", "loads", *["prepared"] * has_copies, "told", READY.decode(), "serves"]


@pytest.mark.parametrize(
    ("leads", "warms_up", "args", "does"),
    [
        (True, True, {}, ["new", "ahead"]),
        (True, False, {}, ["new"]),
        (True, True, {"skip_server_warmup": True}, ["new"]),
        (False, True, {}, []),
        (True, True, {"grammar_backend": "none"}, []),
    ],
)
def test_the_leader_begins_to_load_what_compiles_grammars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leads: bool, warms_up: bool, args: dict[str, Any], does: list[str]
) -> None:
    did: list[str] = []
    client = SimpleNamespace(start_ahead=lambda: did.append("ahead"), close=lambda: None)
    monkeypatch.setattr(scheduler_process, "CompileClient", lambda setup: did.append("new") or client)
    monkeypatch.setattr(scheduler_process.parallel_state, "is_leader", lambda: leads)
    monkeypatch.setenv("SGLANG_GRAMMAR_WARM_UP", str(int(warms_up)))
    server = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **args)
    plan = cast(Any, SimpleNamespace(model=ModelConfig.from_server_args(server)))
    ports = cast(Any, SimpleNamespace(directory=str(tmp_path)))
    scheduler_process.create_grammars(server, plan, ports).shutdown()
    assert did == does
