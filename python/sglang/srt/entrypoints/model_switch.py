"""Which of several models are awake: requests wait for theirs, and the one that was used longest ago sleeps for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.sleeper import RETRY_AFTER_S

logger = logging.getLogger(__name__)

AWAKE, ASLEEP, WAKING, FAILED = "awake", "asleep", "waking", "failed"


class Model(Protocol):
    """What the switch asks of a model."""

    async def sleep(self) -> None:
        """Gives its memory back. Raises RequestError."""

    async def wake(self) -> None:
        """Takes its memory again. Raises RequestError."""


@dataclass(slots=True, eq=False)
class Switched:
    """A model behind the switch."""

    name: str
    model: Model
    ttl_s: float = 0.0
    """Seconds without requests after which it sleeps; 0: never."""
    state: str = ASLEEP
    active: int = 0
    """Requests that are answered now."""
    used: float = 0.0
    """When a request of it began or ended last."""
    woken: float = 0.0
    leaves: bool = False
    """Whether it sleeps once the requests of now have ended: later ones wait until it wakes again."""
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    idle_timer: asyncio.TimerHandle | None = None


class ModelSwitch:
    """Wakes models for requests, one change after another. A model sleeps only when none of its requests is answered,
    so that no answer is cut off."""

    def __init__(
        self, models: Sequence[Switched], max_awake: int = 1, min_stay_s: float = 1.0, max_waiting: int = 256
    ) -> None:
        """max_awake: models that are awake at once; 0: as many as fit. min_stay_s: seconds that a model is awake before
        it sleeps for another one. max_waiting: requests that wait for models; others are refused."""
        self.models = {each.name: each for each in models}
        self._max_awake, self._min_stay_s, self._max_waiting = max_awake, min_stay_s, max_waiting
        self.swaps = 0
        self._queue: list[Switched] = []
        """Models that requests wait for, in the order of their first one."""
        self._worker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Keeps a model awake inside the block, which begins once it is. Raises RequestError 503."""
        model = self.models[name]
        await self._enter(model)
        try:
            yield
        finally:
            model.active -= 1
            model.used = time.monotonic()
            self._changed.set()
            self._sleep_later(model)

    async def unload(self, name: str | None = None) -> None:
        """Puts a model to sleep, or all, once its requests have ended. Raises RequestError."""
        for model in self.models.values() if name is None else [self.models[name]]:
            async with self._changing:
                await self._end(model)

    def lost(self, name: str) -> None:
        """Notes that a model's processes have ended."""
        model = self.models[name]
        model.state = FAILED
        self._refuse(model, RequestError(f"The model {name} has failed.", 503))
        self._changed.set()

    @property
    def awake(self) -> list[Switched]:
        """Returns the models that are awake, that which was used longest ago first."""
        return sorted((each for each in self.models.values() if each.state == AWAKE), key=lambda each: each.used)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _enter(self, model: Switched) -> None:
        """Waits until the model is awake, and counts one more request of it."""
        if model.state == FAILED:
            raise RequestError(f"The model {model.name} has failed.", 503)
        if model.state == AWAKE and not model.leaves:
            model.active += 1
            model.used = time.monotonic()
            return
        if sum(len(each.waiting) for each in self.models.values()) >= self._max_waiting:
            raise RequestError("Too many requests wait for other models.", 503, retry_after=RETRY_AFTER_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(turn)
        if model not in self._queue:
            self._queue.append(model)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._serve_queue())
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                model.active -= 1
                self._changed.set()
            elif turn in model.waiting:
                model.waiting.remove(turn)
            raise

    async def _serve_queue(self) -> None:
        while self._queue:
            model = self._queue[0]
            error: RequestError | None = None
            try:
                async with self._changing:
                    if model.state != AWAKE:
                        await self._wake(model)
            except RequestError as refused:
                error = refused
            except Exception as failed:  # must not end the queue
                logger.exception("The model %s does not wake", model.name)
                error = RequestError(f"The model {model.name} does not wake: {failed}", 503)
            self._queue.remove(model)
            if error is None and model.state == AWAKE:
                self._admit(model)
            else:
                self._refuse(model, error or RequestError(f"The model {model.name} has failed.", 503))

    def _admit(self, model: Switched) -> None:
        turns, model.waiting = model.waiting, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)
                model.active += 1
        model.used = time.monotonic()
        self._sleep_later(model)

    @staticmethod
    def _refuse(model: Switched, error: RequestError) -> None:
        turns, model.waiting = model.waiting, []
        for turn in turns:
            if not turn.done():
                turn.set_exception(error)

    # --- changes ------------------------------------------------------------------------------------------------------

    async def _wake(self, model: Switched) -> None:
        """Wakes a model, after as many others as necessary have gone to sleep."""
        while 0 < self._max_awake <= len(self.awake):
            await self._make_room()
        if model.state == FAILED:
            return
        started, model.state = time.monotonic(), WAKING
        try:
            while True:
                try:
                    await model.model.wake()
                    break
                except RequestError:
                    if not self.awake:
                        raise
                    await self._make_room()  # it does not fit beside the others
        finally:
            if model.state == WAKING:
                model.state = ASLEEP
        if model.state == ASLEEP:
            model.state, model.woken = AWAKE, time.monotonic()
            self.swaps += 1
            logger.info("The model %s is awake (%.2f s)", model.name, model.woken - started)

    async def _make_room(self) -> None:
        """Puts the model to sleep that was used longest ago, once it has stayed long enough and is idle."""
        victim = self.awake[0]
        await asyncio.sleep(max(0.0, victim.woken + self._min_stay_s - time.monotonic()))
        await self._end(victim)

    async def _end(self, model: Switched) -> None:
        """Puts a model to sleep after the requests of now."""
        model.leaves = True
        try:
            while model.active:
                self._changed.clear()
                await self._changed.wait()
            await self._put_to_sleep(model)
        finally:
            model.leaves = False

    async def _put_to_sleep(self, model: Switched) -> None:
        if model.state != AWAKE:
            return
        model.state = ASLEEP  # no request may begin meanwhile
        try:
            await model.model.sleep()
        except BaseException:
            model.state = AWAKE
            raise
        logger.info("The model %s sleeps", model.name)

    def _sleep_later(self, model: Switched) -> None:
        """Starts the time after which a model that nobody uses sleeps."""
        if model.idle_timer is not None:
            model.idle_timer.cancel()
            model.idle_timer = None
        if model.ttl_s and not model.active:
            loop = asyncio.get_running_loop()
            model.idle_timer = loop.call_later(model.ttl_s, lambda: self._spawn(self._expire(model)))

    def _spawn(self, work: Awaitable[None]) -> None:
        self._expiring = asyncio.ensure_future(work)

    async def _expire(self, model: Switched) -> None:
        async with self._changing:
            if model.state == AWAKE and not model.active and time.monotonic() - model.used >= model.ttl_s:
                try:
                    await self._put_to_sleep(model)
                except RequestError as error:
                    logger.warning("The model %s does not sleep: %s", model.name, error.message)
