"""Alternates two microbatches of a step: while a collective of one is on its way, the other computes.

    first    A1 ~~sum~~ A2 ~~sum~~ A3 ...        Ai: what the microbatch computes up to its i-th collective
    second      B1 ~~sum~~ B2 ~~sum~~ B3 ...     launched in the order A1, B1, A2, B2, ...

All computation goes to one stream in this order: when the second microbatch reaches a layer, the keys and states that
the first one stores there are complete. Collectives go to a side stream, one after the other and on all
ranks in the same order. Microbatches alternate in one of two ways:

    blocks    Each microbatch is a generator that yields after every block; one thread computes a block of each in turn.
              This hides deferred all-reduces (`start_collective`), whose results are first needed by the norm after the
              block. Any other collective (`run_collective`) is waited for at once. The host does no more work than for
              launching both microbatches.
    threads   Each microbatch is a call in a thread of its own. Only one thread runs at a time, and hands over to the
              other at every collective. This hides all collectives, wherever a layer needs one, but each handover
              takes the host as long as half of a block's launches.
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
"""A microbatch as a generator: yields after every block, and returns the result at the end."""


class SideStream(Protocol):
    """Where collectives run beside the computation."""

    def send(self, collective: Collective) -> Collective:
        """Launches a collective after everything launched so far. Returns a function that makes later launches wait for
        the result and returns it."""

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        """Returns a factory of context managers: a thread that enters one launches to the stream that is current in
        the calling thread now."""

    def clear(self) -> None:
        """Drops collectives that nobody waits for, after a microbatch has failed."""


class CudaSideStream:
    """A CUDA stream of high priority for collectives."""

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(torch.device(device), priority=-1)

    def send(self, collective: Collective) -> Collective:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = collective()
            arrived = self._stream.record_event()

        def receive(_keeps_operands: Collective = collective) -> torch.Tensor:
            # The default argument keeps the collective's operands alive until the current stream waits for it.
            current = torch.cuda.current_stream()
            current.wait_event(arrived)
            result.record_stream(current)  # the side stream may have allocated it, and must not reuse it too early
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
        """Does nothing: every collective was launched by `send` and ends by itself."""


class CpuSideStream:
    """Stands for a side stream on CPUs: a collective runs when it is waited for, i.e. as late as possible, after
    all that were sent before it."""

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
    """Raised when the second microbatch does not send the collectives that the first one sends at the same places. It
    could then run ahead of the first one, and read keys or states that are not stored yet."""


class OtherMicrobatchFailed(RuntimeError):
    """Ends a microbatch because the other one has failed."""


class PingPong:
    """Runs two microbatches alternately; one `run` or `run_blocks` at a time."""

    def __init__(self, side_stream: SideStream) -> None:
        self._side_stream = side_stream
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="second microbatch")
        self.active = False
        """True inside `run` and `run_blocks`, where the groups send their collectives through `run_collective`."""
        self.by_block = False
        """True inside `run_blocks`, where the groups send deferred all-reduces through `start_collective`."""
        self.exact = False
        """True: all-reduces inside `run` and `run_blocks` are never quantized."""

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Runs both calls in threads and returns their results; collectives inside go through `run_collective`. Raises
        the exception of the one that fails first; the other ends at its next collective."""
        self._begin()
        self._ended = [False, False]
        # One lock per microbatch, used as a semaphore, but cheaper: it acquires its own to wait, the other releases it.
        self._go = (threading.Lock(), threading.Lock())
        for go in self._go:
            go.acquire()
        self._failure: BaseException | None = None
        other = self._executor.submit(self._run_second, second, self._side_stream.here())
        try:
            result = self._run_storing_failure(first)
        finally:
            self._end(0)
            wait((other,))
            self.active = False
            self._side_stream.clear()
        results = result, other.result()
        self._check_all_sent()
        return results

    def run_blocks(self, first: Blocks[T], second: Blocks[T]) -> tuple[T, T]:
        """Runs a block of each generator in turn and returns their results. Both must have the same number of blocks.
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
                        if number in results:
                            raise MicrobatchesDiffer(f"microbatch {number} has fewer blocks than the other") from None
                        results[number] = end.value
        finally:
            for microbatch in microbatches:
                microbatch.close()
            self.active = self.by_block = False
            self._side_stream.clear()
        self._check_all_sent()
        return results[0], results[1]

    def _begin(self) -> None:
        self._running = 0
        self._sent: tuple[list[object], list[object]] = ([], [])
        self.active = True

    def _check_all_sent(self) -> None:
        """Raises MicrobatchesDiffer if the second microbatch has sent fewer collectives than the first: it then did not
        wait for the first one where these were missing."""
        first, second = map(len, self._sent)
        if second < first:
            raise MicrobatchesDiffer(f"the second microbatch has sent {second} collectives, the first one {first}")

    def start_collective(self, what: object, collective: Collective) -> Collective:
        """Sends a collective of the running microbatch and returns a function that waits for its result. what: as in
        `run_collective`. Raises MicrobatchesDiffer if the second microbatch sends another collective than the first
        did."""
        running = self._running
        mine, first = self._sent[running], self._sent[0]
        mine.append(what)
        if running == 1 and (len(mine) > len(first) or first[len(mine) - 1] != what):
            raise MicrobatchesDiffer(
                f"the second microbatch sends {what} where the first one has sent {first[len(mine) - 1 :][:1]}"
            )
        return self._side_stream.send(collective)

    def run_collective(self, what: object, collective: Collective) -> torch.Tensor:
        """Sends a collective of the running microbatch and returns its result. With threads, the other microbatch
        computes meanwhile. what: describes the collective; equal for the collectives at the same place of both
        microbatches. Raises MicrobatchesDiffer as `start_collective` does, and OtherMicrobatchFailed."""
        running, receive = self._running, self.start_collective(what, collective)
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

    def _run_second(self, microbatch: Callable[[], T], here: Callable[[], AbstractContextManager[object]]) -> T:
        """Runs the second microbatch in its thread, once the first one has yielded or ended. here: what
        `SideStream.here` returned in the first."""
        self._go[1].acquire()
        try:
            if self._failure is not None:
                raise OtherMicrobatchFailed from self._failure
            with here(), torch.inference_mode():
                return self._run_storing_failure(microbatch)
        finally:
            self._end(1)

    def _run_storing_failure(self, microbatch: Callable[[], T]) -> T:
        """Runs a microbatch. If it fails, the other one ends at its next collective and raises the same exception."""
        try:
            return microbatch()
        except OtherMicrobatchFailed as error:
            assert self._failure is not None
            raise self._failure from error
        except BaseException as error:
            self._failure = error
            raise

    def _end(self, microbatch: int) -> None:
        """Marks a microbatch as ended, so that the other one runs on and yields no more."""
        other = 1 - microbatch
        self._ended[microbatch] = True
        if not self._ended[other]:
            self._running = other
            self._go[other].release()
