"""Sleep and wake as clients ask for them: what happens to requests that run, and to those that come meanwhile."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.wire.io_struct import ControlReply
from sglang.srt.utils.engine_state import EngineState, StateError, checked_tags

CALL_LIMIT_S = 600.0
DRAIN_LIMIT_S = 60.0
"""Seconds that requests which run get to end before a server sleeps."""
POLL_S = 0.05
RETRY_AFTER_S = 5
"""Seconds after which a refused client may try again."""
ABORT, WAIT, KEEP = "abort", "wait", "keep"
MODES = (ABORT, WAIT, KEEP)

Control = Callable[[str, dict[str, Any], float, "Undo | None"], Awaitable[ControlReply]]


@dataclass(slots=True)
class SleepTotals:
    """What a server has slept since its start."""

    sleeps: int = 0
    sleep_seconds: float = 0.0
    wakes: int = 0
    wake_seconds: float = 0.0


class Sleeper:
    """Puts the engine to sleep and wakes it. One change is made after another, and one that has begun is completed even
    if its client leaves."""

    def __init__(
        self,
        state: EngineState,
        control: Control,
        abort_all: Callable[[], None],
        is_paused: Callable[[], bool],
        fail_running: Callable[[RequestError], None],
        wakes: bool,
    ) -> None:
        """control(kind, args, timeout, undo): the tokenizer manager's. is_paused(): whether generation is paused.
        fail_running(error): ends all requests with an error. wakes: whether a request wakes the server."""
        self.state, self.totals, self.wakes = state, SleepTotals(), wakes
        self._control, self._abort_all, self._is_paused = control, abort_all, is_paused
        self._fail_running = fail_running
        self._changing = asyncio.Lock()
        self._leaving = self._paused = False
        """Whether it is going to sleep; whether requests wait for the end of the sleep."""

    async def sleep(
        self, tags: Collection[str] | None, keep_weights: bool, mode: str = WAIT, limit_s: float = DRAIN_LIMIT_S
    ) -> None:
        """Gives the memory of these tags back, of all for none. mode: requests that run are aborted, waited for, or
        kept until the server is awake. Raises RequestError: 503 if they still run after `limit_s` seconds."""
        await self._completed(self._sleep(self._checked(tags), keep_weights, mode, limit_s))

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Takes memory for these tags again, for all for none. Raises RequestError 503 where there is too little."""
        await self._completed(self._wake(self._checked(tags)))

    async def admit(self) -> None:
        """Returns once requests can be computed, and wakes the server for that if it is to. Raises RequestError 503."""
        while self._leaving or not self.state.serves:
            if not self.wakes or not (self._leaving or self.state.asleep):
                problem = self.state.problem or "The server is going to sleep."
                raise RequestError(problem, 503, retry_after=RETRY_AFTER_S)
            await self.wake()

    @staticmethod
    def _checked(tags: Collection[str] | None) -> list[str]:
        try:
            return list(checked_tags(tags))
        except StateError as error:
            raise RequestError(str(error)) from None

    @staticmethod
    async def _completed(work: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(asyncio.create_task(work))

    async def _sleep(self, tags: list[str], keep_weights: bool, mode: str, limit_s: float) -> None:
        async with self._changing:
            if not self.state.to_sleep(tags):
                return
            started, self._leaving = time.monotonic(), True
            try:
                if mode == ABORT:
                    self._abort_all()
                elif mode == KEEP:
                    self._paused = self._paused or not self._is_paused()  # a client's pause outlasts the sleep
                    await self._ask("pause", {"mode": "retract"})
                undo = Undo("wake", {"tags": self.state.to_sleep(tags)})
                args = {"tags": tags, "keep_weights": keep_weights}
                while (reply := await self._control("sleep", args, CALL_LIMIT_S, undo)).data.get("busy"):
                    if time.monotonic() - started > limit_s:
                        break
                    await asyncio.sleep(POLL_S)
                self._follow(reply)
            finally:
                self._leaving = False
                await self.go_on()
            self.totals.sleeps += 1
            self.totals.sleep_seconds += time.monotonic() - started

    async def _wake(self, tags: list[str]) -> None:
        async with self._changing:
            if not self.state.to_wake(tags):
                return
            started = time.monotonic()
            undo = Undo("sleep", {"tags": self.state.to_wake(tags), "keep_weights": True})
            args = {"tags": tags, "key": uuid.uuid4().hex}
            self._follow(await self._control("wake", args, CALL_LIMIT_S, undo))
            if self._paused and self.state.broken:  # nobody knows of them who could send other weights
                self._fail_running(RequestError(self.state.problem, 503, retry_after=RETRY_AFTER_S))
            await self.go_on()
            self.totals.wakes += 1
            self.totals.wake_seconds += time.monotonic() - started

    async def go_on(self) -> None:
        """Lets requests go on that were kept, once they can: after a wake, or an update behind it."""
        if self._paused and self.state.serves and not self._leaving:
            self._paused = False
            await self._ask("resume", {})

    def _follow(self, reply: ControlReply) -> None:
        """Takes over the state of the schedulers. Raises RequestError for a refusal."""
        if "state" in reply.data:
            self.state.follow(reply.data["state"])
        if not reply.ok:
            raise RequestError(f"The server keeps its state: {reply.message}.", 503, retry_after=RETRY_AFTER_S)

    async def _ask(self, kind: str, args: dict[str, Any]) -> None:
        reply = await self._control(kind, args, CALL_LIMIT_S, None)
        if not reply.ok:
            raise RequestError(reply.message, 503, retry_after=RETRY_AFTER_S)
