"""The caller's end of one generate call: an asynchronous iterator over the outputs of its sequences.

    stream = await tokenizer_manager.submit(GenerateRequest(...))      # raises RequestError before anything is sent
    async for output in stream:            # deltas; sequences of a batch interleave by output.index
        ...
    results = await stream.collect()       # instead of iterating: one merged output a sequence, in index order
    await stream.forward(take)             # instead: calls `take` with each output, without waking a task for it
    await stream.aclose()                  # always, or `async with stream`: aborts what still runs

All methods belong to the event loop that the tokenizer manager is attached to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from sglang.srt.managers.front.generate_request import GenerateOutput, RequestError
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq

CLIENT_CLOSED_REQUEST = 499
"""Status of a sequence that was aborted on request: a normal end, not an error."""


class GenerationStream:
    """Outputs of the sequences of one call. A slow reader builds up no queue: waiting outputs of a sequence are
    merged."""

    def __init__(
        self,
        requests: list[TokenizedGenerateReq],
        prompt_texts: list[str | None],
        num_samples: int,
        on_close: Callable[[GenerationStream], None],
    ) -> None:
        self.requests = requests
        """One a sequence, in index order: rid, prompt ids and resolved sampling parameters."""
        self.prompt_texts = prompt_texts
        """One a prompt, if the call keeps them; None where the caller gave token ids."""
        self.num_samples = num_samples
        self.is_batch = False
        """Whether the caller gave a list of prompts."""
        self.created_time = 0.0
        """time.monotonic() when the call came in."""
        self._on_close = on_close
        self._unfinished = len(requests)
        self._waiting: deque[GenerateOutput] = deque()
        self._latest: list[GenerateOutput | None] = [None] * len(requests)
        self._texts: list[list[str]] = [[] for _ in requests]
        """Texts of the outputs that are merged in `_latest`, which has only the first one's."""
        self._collects = False
        """Whether `collect` runs; only the end wakes the reader then."""
        self._error: RequestError | None = None
        self._closed = False
        self._waiter: asyncio.Future[bool] | None = None
        """What the reader waits for: true, or false after `take` has asked for a pause."""
        self._take: Callable[[GenerateOutput], bool] | None = None
        self._handing_over = False
        """Whether the event loop is about to call `_hand_over_now`."""

    @property
    def kept_bytes(self) -> int:
        """Returns the approximate bytes of the client's texts that the stream holds: prompts and parameters."""
        parameters = sum(request.sampling_params.num_bytes for request in self.requests[:: self.num_samples])
        return parameters + sum(len(text) for text in self.prompt_texts if text is not None)

    # --- the reader's side --------------------------------------------------------------------------------------------

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> GenerateOutput:
        while not self._waiting:
            if self._error is not None:
                error, self._error = self._error, None
                self.close()
                raise error
            if self._closed or self._unfinished == 0:
                raise StopAsyncIteration
            await self._wait()
        return self._next()

    async def forward(self, take: Callable[[GenerateOutput], bool]) -> bool:
        """Calls `take` with each output until the end, then returns True; or until `take` returns False to pause, then
        returns False. The event loop makes the calls: at thousands of outputs a second, waking a task for each would
        cost more than its work. Raises RequestError, and what `take` raises."""
        self._take = take
        try:
            while self._hand_over(take):
                if self._error is not None:
                    error, self._error = self._error, None
                    self.close()
                    raise error
                if self._closed or self._unfinished == 0:
                    return True
                if not await self._wait():
                    break
            return False
        finally:
            self._take = None

    async def collect(self) -> list[GenerateOutput]:
        """Returns all complete sequences in index order. Nothing may have been read from the stream before."""
        self._collects = True
        self._waiting.clear()  # they are in `_latest`, too
        while self._unfinished and self._error is None and not self._closed:
            await self._wait()
        if self._error is not None:
            self.close()
            raise self._error
        return [self._taken(output) for output in self._latest if output is not None]

    async def aclose(self) -> None:
        """Does what `close` does."""
        self.close()

    def close(self) -> None:
        """Stops reading and aborts sequences that still run. Harmless after the end."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._on_close(self)

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # --- the tokenizer manager's side ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def push(self, output: GenerateOutput) -> None:
        """Hands over the new output of one sequence. Ignored once the call has failed."""
        if self._closed or self._error is not None:
            return
        finish = output.finish
        if finish is not None:
            self._unfinished -= 1
            if finish.status_code is not None and finish.status_code != CLIENT_CLOSED_REQUEST:
                self.fail(RequestError(finish.message or "the request was aborted", finish.status_code))
                return
        is_first = self._add(output)
        if self._collects:
            if self._unfinished == 0:
                self._wake()
            return
        if is_first:
            self._waiting.append(output)
        if self._take is None:
            self._wake()
        elif not self._handing_over:  # handed over later, merged with outputs that come until then
            self._handing_over = True
            asyncio.get_running_loop().call_soon(self._hand_over_now)

    def fail(self, error: RequestError) -> None:
        """Ends the call with an error, which the reader gets after the outputs that it has not read yet."""
        if self._error is None and not self._closed:
            self._error = error
            self._wake()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add(self, output: GenerateOutput) -> bool:
        """Merges an output with those of its sequence that were not read yet. Returns whether there were none."""
        self._texts[output.index].append(output.text)
        latest = self._latest[output.index]
        if latest is None:
            self._latest[output.index] = output
            return True
        latest.merge(output)
        return False

    def _next(self) -> GenerateOutput:
        return self._taken(self._waiting.popleft())

    def _taken(self, output: GenerateOutput) -> GenerateOutput:
        """Returns a merged output with its whole text."""
        texts = self._texts[output.index]
        if len(texts) > 1:
            output.text = "".join(texts)
        texts.clear()
        self._latest[output.index] = None
        return output

    def _hand_over(self, take: Callable[[GenerateOutput], bool]) -> bool:
        """Calls `take` with the waiting outputs. Returns whether `take` wants more."""
        while self._waiting:
            if not take(self._next()):
                return False
        return True

    def _hand_over_now(self) -> None:
        """Hands outputs to a reader that waits in `forward`; a reader that is running takes them itself."""
        self._handing_over = False
        take, waiter = self._take, self._waiter
        if take is None or waiter is None or waiter.done():
            return
        try:
            wants_more = self._hand_over(take)
        except Exception as error:
            waiter.set_exception(error)
            return
        if not wants_more:
            waiter.set_result(False)
        elif self._unfinished == 0:
            waiter.set_result(True)

    async def _wait(self) -> bool:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
