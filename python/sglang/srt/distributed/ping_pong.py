"""Alternates two microbatches of a step: while a collective of one is on its way, the other computes.

    first    A1 ~~sum~~ A2 ~~sum~~ A3 ...        Ai: what the microbatch computes up to its i-th collective
    second      B1 ~~sum~~ B2 ~~sum~~ B3 ...     launched in the order A1, B1, A2, B2, ...

Everything that is computed goes to one stream in this order, so that what the first microbatch stores (keys, states) is
there when the second one comes to the same place. Collectives go to a lane of their own, one behind the other, on all
ranks in the same order. Microbatches alternate in one of two ways:

    blocks    Each microbatch is a generator that stops behind every block; one thread computes a block of each in turn.
              That hides the sums that blocks leave to what follows them (`start`), at no more cost to the host than
              launching both microbatches. Any other collective is waited for where it is asked for.
    threads   Each microbatch is a call in a thread of its own, of which only one runs at a time: at a collective it
              gives way to the other. So all are hidden, whatever layers exchange and wherever; but to hand over takes
              the host as long as half of a block's launches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
Collective = Callable[[], torch.Tensor]
Blocks = Generator[None, None, T]
"""A generator that yields after every block, and returns the result of all."""


class Lane(Protocol):
    """Where collectives run beside the computation."""

    def send(self, collective: Collective) -> Collective:
        """Launches a collective after everything launched so far. Returns a function that makes later launches wait for
        the result and returns it."""

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        """Returns a factory of context managers: a thread that enters one launches to the stream that is current
        now."""

    def clear(self) -> None:
        """Drops collectives that nobody waits for, after a microbatch has failed."""


class StreamLane:
    """A CUDA stream of high priority for collectives."""

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(torch.device(device), priority=-1)

    def send(self, collective: Collective) -> Collective:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = collective()
            arrived = self._stream.record_event()

        def receive(_operands: Collective = collective) -> torch.Tensor:  # they stay until the stream has waited
            current = torch.cuda.current_stream()
            current.wait_event(arrived)
            result.record_stream(current)  # it may be memory of the lane's
            return result

        return receive

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        stream = torch.cuda.current_stream()

        @contextmanager
        def same_stream() -> Iterator[None]:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                yield

        return same_stream

    def clear(self) -> None:
        pass


class LateLane:
    """A lane for CPUs, where launching is computing: a collective runs when it is waited for, i.e. as late as possible,
    after all that were sent before it."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def send(self, collective: Collective) -> Collective:
        arrived: list[torch.Tensor] = []
        self._waiting.append(lambda: arrived.append(collective()))

        def receive() -> torch.Tensor:
            while not arrived:
                self._waiting.popleft()()
            return arrived[0]

        return receive

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def clear(self) -> None:
        self._waiting.clear()


class MicrobatchesDiffer(RuntimeError):
    """Raised when the microbatches do not send the same collectives in the same order, so that one might overtake the
    other."""


class OtherMicrobatchFailed(RuntimeError):
    """Ends a microbatch because the other one has failed."""


class PingPong:
    """Runs two microbatches alternately; one `run` or `run_blocks` at a time."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second microbatch")
        self.active = False
        """True inside `run` and `run_blocks`: collectives go through `travel`."""
        self.by_block = False
        """True inside `run_blocks`: deferred all-reduces of blocks go through `start`."""
        self.exact = False
        """True: all-reduces inside are never quantized."""

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Runs both calls in threads and returns their results; collectives inside go through `travel`. Raises the
        exception of the one that fails first; the other ends at its next collective."""
        self._begin()
        self._ended = [False, False]
        self._go = (
            threading.Lock(),
            threading.Lock(),
        )  # held until its microbatch may go on: less work than semaphores
        for go in self._go:
            go.acquire()
        self._failure: BaseException | None = None
        other = self._thread.submit(self._second, second, self._lane.here())
        try:
            result = self._guarded(first)
        finally:
            self._end(0)
            wait((other,))
            self.active = False
            self._lane.clear()
        return result, other.result()

    def run_blocks(self, first: Blocks[T], second: Blocks[T]) -> tuple[T, T]:
        """Runs both generators block by block, which must have the same number of blocks, and returns their results.
        Raises the exception of the one that fails first, and closes the other."""
        self._begin()
        self.by_block = True
        microbatches, results = (first, second), dict[int, T]()
        try:
            while len(results) < len(microbatches):
                for number, microbatch in enumerate(microbatches):
                    self._running = number
                    try:
                        next(microbatch)
                    except StopIteration as end:
                        results[number] = end.value
        finally:
            for microbatch in microbatches:
                microbatch.close()
            self.active = self.by_block = False
            self._lane.clear()
        return results[0], results[1]

    def _begin(self) -> None:
        self._running = 0
        self._sent: tuple[list[object], list[object]] = ([], [])
        self.active = True

    def start(self, what: object, collective: Collective) -> Collective:
        """Sends a collective and returns a function that waits for its result. what: as in `travel`. Raises
        MicrobatchesDiffer if the second microbatch sends another collective than the first did."""
        running = self._running
        mine, first = self._sent[running], self._sent[0]
        mine.append(what)
        if running == 1 and (len(mine) > len(first) or first[len(mine) - 1] != what):
            raise MicrobatchesDiffer(
                f"the second microbatch sends {what} where the first one has sent {first[len(mine) - 1 :][:1]}"
            )
        return self._lane.send(collective)

    def travel(self, what: object, collective: Collective) -> torch.Tensor:
        """Returns the collective's result, and lets the other microbatch compute meanwhile. what: identifies the
        collective, equal in both microbatches. Called by the microbatch that runs."""
        running, receive = self._running, self.start(what, collective)
        if self.by_block:
            return receive()
        self._yield_to_other(running)
        if self._failure is not None:
            raise OtherMicrobatchFailed from self._failure
        return receive()

    def _yield_to_other(self, running: int) -> None:
        """Lets the other microbatch run until it yields in turn; returns at once if it has ended."""
        other = 1 - running
        if not self._ended[other]:
            self._running = other
            self._go[other].release()
            self._go[running].acquire()

    def _second(self, microbatch: Callable[[], T], here: Callable[[], AbstractContextManager[object]]) -> T:
        self._go[1].acquire()
        try:
            if self._failure is not None:
                raise OtherMicrobatchFailed from self._failure
            with here(), torch.inference_mode():
                return self._guarded(microbatch)
        finally:
            self._end(1)

    def _guarded(self, microbatch: Callable[[], T]) -> T:
        try:
            return microbatch()
        except OtherMicrobatchFailed as error:
            assert self._failure is not None
            raise self._failure from error
        except BaseException as error:
            self._failure = error
            raise

    def _end(self, microbatch: int) -> None:
        """Marks a microbatch as ended and lets the other run to its end."""
        other = 1 - microbatch
        self._ended[microbatch] = True
        if not self._ended[other]:
            self._running = other
            self._go[other].release()
