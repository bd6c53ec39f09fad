"""Updates of weights, sleeps and pauses that meet: what each of them leaves to the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sleeper import KEEP, Sleeper
from sglang.srt.managers.front.weight_updates import WeightUpdates as Updates
from sglang.srt.managers.scheduler.weight_updates import WeightUpdates
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq
from sglang.srt.utils.engine_state import TAGS, EngineState


def test_a_commit_after_a_sleep_is_refused() -> None:
    """The sleep came while the new weights were staged."""
    memory = cast(Any, SimpleNamespace(state=EngineState()))
    updates = WeightUpdates(cast(Any, None), cast(Any, None), cast(Any, None), memory)
    updates._staged = []
    memory.state.slept(TAGS, True)
    reply = updates.control(ControlReq(1, "commit_weights", {"key": "k", "version": None}))
    assert not reply.ok and "asleep" in reply.message


@pytest.mark.parametrize(("tensors", "selector"), [({}, "all"), ({"a": torch.ones(1)}, "draft")])
def test_a_directory_that_still_has_the_weights_is_read_again(tensors: Any, selector: str) -> None:
    """Nothing of the target was written."""
    served = SimpleNamespace(
        parts=lambda _: [], written=False, takes_single_tensors=True, draft=object(), refuse=lambda: "",
        problem_of_reading=lambda: "", plan=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    scheduler = SimpleNamespace(sync=lambda: None, schedulers=[], reqs={})
    memory = SimpleNamespace(state=EngineState(), weights_changed=lambda: None)
    updates = WeightUpdates(cast(Any, None), cast(Any, None), cast(Any, scheduler), cast(Any, memory))
    updates._served = cast(Any, served)
    updates._take(tensors, {"selector": selector, "key": "k", "version": None})
    assert not updates.problem_of_reading()


def test_requests_that_were_kept_fail_where_waking_breaks_the_weights() -> None:
    """And the server goes on with new requests once it has other weights."""
    asked: list[str] = []
    failed: list[RequestError] = []
    scheduler, state = EngineState(), EngineState()

    async def control(kind: str, args: dict[str, Any], timeout: float, undo: Any) -> ControlReply:
        asked.append(kind)
        if kind == "sleep":
            scheduler.slept(args["tags"], True)
        elif kind == "wake":
            scheduler.woke(args["tags"])
            scheduler.break_weights("after waking they give other results")
        return ControlReply(1, data={"state": scheduler.to_wire()})

    async def main() -> None:
        sleeper = Sleeper(state, control, lambda: None, lambda: False, failed.append, False)
        await sleeper.sleep(None, True, KEEP)
        await sleeper.wake()
        assert [(error.status_code, "other results" in error.message) for error in failed] == [(503, True)]
        assert asked == ["pause", "sleep", "wake"]
        state.weights_restored()
        await sleeper.go_on()

    asyncio.run(main())
    assert asked[-1] == "resume"


@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_of_a_client_outlasts_the_sleep(paused: bool) -> None:
    asked: list[str] = []
    scheduler = EngineState()

    async def control(kind: str, args: dict[str, Any], timeout: float, undo: Any) -> ControlReply:
        asked.append(kind)
        if kind == "sleep":
            scheduler.slept(args["tags"], True)
        elif kind == "wake":
            scheduler.woke(args["tags"])
        return ControlReply(1, data={"state": scheduler.to_wire()})

    async def main() -> None:
        sleeper = Sleeper(EngineState(), control, lambda: None, lambda: paused, lambda error: None, False)
        await sleeper.sleep(None, True, KEEP)
        await sleeper.wake()

    asyncio.run(main())
    assert asked == ["pause", "sleep", "wake", *(() if paused else ("resume",))]


def test_weights_are_reset_once_no_request_runs() -> None:
    asked: list[int] = []
    front = SimpleNamespace(args=SimpleNamespace(model_path="m"), num_unfinished=1, state=EngineState())

    async def control(*_: Any) -> ControlReply:
        asked.append(front.num_unfinished)
        return ControlReply(1)

    async def main() -> None:
        front.control = control
        reset = asyncio.create_task(Updates(cast(Any, front)).check("reset_tensors", "all", []))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        front.num_unfinished = 0
        await reset

    asyncio.run(main())
    assert asked == [0]
