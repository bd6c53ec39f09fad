"""Grammars for requests, without ever blocking the scheduler: another process verifies them, threads compile them, the
result is cached and polled.

There are two steps because, with tensor parallelism, they belong to different ranks. The leader has a grammar verified
(`compile_process`), where it may fail, take too long or too much memory. When it has passed, every rank compiles its
own copy (`build`), which is then known to end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from queue import PriorityQueue
from typing import Protocol

from sglang.srt.constrained.compile_client import Check
from sglang.srt.constrained.compile_process import MIB, Verdict
from sglang.srt.constrained.grammar import Grammar, GrammarKey
from sglang.srt.constrained.grammar_backends import GrammarBackend

logger = logging.getLogger(__name__)

WARM_UP = GrammarKey("json_schema", '{"type": "string"}')
MAX_CACHED = 128
MAX_CACHED_BYTES = 256 * MIB
"""Compiled grammars that are kept while no request uses them."""
MAX_LIVE_BYTES = 1024 * MIB
"""All compiled grammars of a process, those of running requests included."""
MAX_VERDICTS = 4096
MAX_UNDER_WAY = 1024
"""Grammars that are being verified or wait for it."""
WAIT_LIMIT_S = 60.0
"""Most seconds from a request's arrival until its grammar is ready."""
SLOW_COMPILE_S = 1.0
"""Grammars that take longer are built in a queue of their own, so that they do not delay others."""

_NO_BACKEND = Verdict(error="This server was started with --grammar-backend none.")
_TOO_LATE = Verdict(
    error=f"The grammar was not ready after {WAIT_LIMIT_S:g} s; simplify it, or send it again when no others wait.",
    status_code=503,  # a grammar that takes too long by itself is refused before
)
_TOO_MANY = Verdict(error="Too many grammars wait to be compiled; send the request again later.", status_code=503)
_NOT_BUILT = Verdict(error="The grammar could not be built; the log of the server says why.", status_code=500)
_TOO_MUCH = Verdict(error="The grammars in use fill their memory; send the request again later.", status_code=503)


class Verifier(Protocol):
    """Interface of `CompileClient`."""

    def submit(self, key: GrammarKey) -> Check: ...

    def cancel(self, check: Check) -> None: ...

    def close(self) -> None: ...


class BuildState(IntEnum):
    """State of a build; the minimum over all ranks is the common state."""

    FAILED = 0
    RUNNING = 1
    READY = 2


@dataclass(slots=True)
class PendingGrammar:
    """A grammar that one request waits for."""

    key: GrammarKey
    digest: bytes
    deadline: float
    """Deadline by the leader's clock; other ranks' clocks do not count."""
    check: Check | None = None
    """Leader only: the verification under way, or its result."""
    build: Future[Grammar] | None = None
    """The build; set once the verdict is known."""


class GrammarManager:
    """The grammars of one scheduler process. Requests with the same grammar share the work; verdicts are remembered."""

    def __init__(
        self,
        backend: GrammarBackend | None,
        verifier: Verifier | None = None,
        max_cached: int = MAX_CACHED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """backend None: the server runs without grammars, and every request for one fails. verifier: given on the
        leader only."""
        self._backend = backend
        self._verifier = verifier
        self._max_cached = max_cached
        self._clock = clock
        self._verdicts: OrderedDict[bytes, Check] = OrderedDict()
        self._under_way: dict[bytes, Check] = {}
        self._grammars: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._live = _LiveBytes()
        self._news = False
        """Used by the leader: a request or a verdict has come."""
        self._closed = False
        self._load_lock = threading.Lock()
        self._quick = _Builds(self._compile, "grammar")
        self._slow = _Builds(self._compile, "slow-grammar")

    def warm_up(self) -> None:
        """Loads the grammar compiler, here and in the other process, before the first grammar. For the leader. Does not
        block."""
        if self._backend is not None and self._verifier is not None:
            self._verifier.submit(WARM_UP).verdict.add_done_callback(self._warm_up_here)

    def _warm_up_here(self, verified: Future[Verdict]) -> None:
        """Loads the library in this process, after the other process has written the vocabulary."""
        if (error := verified.result().error) and not self._closed:
            logger.warning("%s", error)
        elif not error:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._quick.submit(WARM_UP, 0.0)

    def request(self, key: GrammarKey) -> PendingGrammar:
        """Starts verifying a grammar, if this is the leader and the verdict is not known. Does not block."""
        pending = PendingGrammar(key, key.digest(), self._clock() + WAIT_LIMIT_S)
        self._news = True
        if self._verifier is not None:
            pending.check = self._check(self._verifier, pending)
        return pending

    def _check(self, verifier: Verifier, pending: PendingGrammar) -> Check:
        check = self._verdicts.get(pending.digest)
        if check is None:
            if len(self._under_way) >= MAX_UNDER_WAY:
                return _checked(_TOO_MANY)
            check = self._verdicts[pending.digest] = self._under_way[pending.digest] = verifier.submit(pending.key)
            check.verdict.add_done_callback(self._hear)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(pending.digest)
        return check

    def has_news(self, oldest: PendingGrammar) -> bool:
        """Returns whether `verdict` may have changed for any request since the last call. oldest: the grammar that has
        waited longest."""
        news, self._news = self._news, False
        return news or self._clock() >= oldest.deadline

    def verdict(self, pending: PendingGrammar) -> Verdict | None:
        """Returns whether the grammar can be built; None if that is not known yet. For the leader."""
        if self._backend is None:
            return _NO_BACKEND
        assert pending.check is not None
        if pending.check.verdict.done():
            verdict = pending.check.verdict.result()
            too_much = not verdict.error and not self._cached(pending.digest) and self._live.total > MAX_LIVE_BYTES
            return _TOO_MUCH if too_much else verdict
        return _TOO_LATE if self._clock() >= pending.deadline else None

    def keep_only(self, wanted: Collection[bytes]) -> None:
        """Cancels work that no request waits for, and forgets verdicts that may differ next time. Called when requests
        have come or gone."""
        for digest, check in list(self._under_way.items()):
            if check.verdict.done():
                del self._under_way[digest]
                verdict = check.verdict.result()
                if verdict.error and verdict.status_code != 400:
                    self._verdicts.pop(digest, None)
            elif digest not in wanted:
                del self._under_way[digest]
                self._verdicts.pop(digest, None)
                assert self._verifier is not None
                self._verifier.cancel(check)
        for digest, future in list(self._grammars.items()):
            if digest not in wanted and not future.done() and future.cancel():
                del self._grammars[digest]

    def build(self, pending: PendingGrammar, seconds: float) -> None:
        """Starts compiling a verified grammar, unless that has happened. seconds: the time that its verification
        took."""
        future = self._grammars.get(pending.digest)
        if future is None:
            builds = self._slow if seconds > SLOW_COMPILE_S else self._quick
            future = self._grammars[pending.digest] = builds.submit(pending.key, seconds)
        self._grammars.move_to_end(pending.digest)
        self._shrink()
        pending.build = future

    def state(self, pending: PendingGrammar) -> BuildState:
        """Returns the state of a grammar whose `build` was called. On the leader it is FAILED once the deadline has
        passed."""
        assert pending.build is not None
        if pending.build.done():
            return BuildState.READY if pending.build.exception() is None else BuildState.FAILED
        late = self._verifier is not None and self._clock() >= pending.deadline
        return BuildState.FAILED if late else BuildState.RUNNING

    def built(self, pending: PendingGrammar) -> Grammar:
        """Returns the request's own grammar, at its start; its state must be READY."""
        assert pending.build is not None
        return pending.build.result().fresh()

    def failure(self, pending: PendingGrammar) -> Verdict:
        """Returns the verdict for a build that failed on some rank. It never blames the grammar, which was verified
        before."""
        assert pending.build is not None
        if not pending.build.done():
            return _TOO_LATE
        if (error := pending.build.exception()) is not None:
            logger.error("A verified grammar could not be built: %r", error)
        self._grammars.pop(pending.digest, None)
        return _NOT_BUILT

    def _hear(self, _: Future[Verdict]) -> None:
        self._news = True

    def _compile(self, key: GrammarKey) -> Grammar:
        assert self._backend is not None
        with self._load_lock:
            self._backend.load()
        grammar = self._backend.compile(key)
        self._live.add(grammar)
        return grammar

    def _cached(self, digest: bytes) -> bool:
        return digest in self._grammars

    def _shrink(self) -> None:
        """Drops the least recently used grammars beyond the limits."""
        ready = [f.result() for f in self._grammars.values() if f.done() and f.exception() is None]
        size = sum(grammar.size_bytes for grammar in ready)
        while len(self._grammars) > self._max_cached or (size > MAX_CACHED_BYTES and len(self._grammars) > 1):
            _, future = self._grammars.popitem(last=False)
            if future.done() and future.exception() is None:
                size -= future.result().size_bytes

    def flush(self) -> None:
        """Drops all cached grammars and finished verdicts. Waiting requests hold their own references and are not
        affected; a build that nobody waits for any more is not cached when it ends."""
        for digest in [digest for digest, check in self._verdicts.items() if check.verdict.done()]:
            del self._verdicts[digest]
        self._grammars.clear()

    def num_cached(self) -> int:
        return len(self._grammars)

    def shutdown(self) -> None:
        """Drops work that has not started; a running build ends by itself."""
        self._closed = True
        if self._verifier is not None:
            self._verifier.close()
        for builds in (self._quick, self._slow):
            builds.shutdown()


class _Builds:
    """A compiling thread. Short builds go first, so that hundreds of others do not delay them."""

    def __init__(self, compile_grammar: Callable[[GrammarKey], Grammar], name: str) -> None:
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._numbers = itertools.count()
        self._waiting: PriorityQueue[tuple[float, int, Future[Grammar], GrammarKey]] = PriorityQueue()

    def submit(self, key: GrammarKey, seconds: float) -> Future[Grammar]:
        """Queues a build. seconds: its expected time. Raises RuntimeError after `shutdown`."""
        future: Future[Grammar] = Future()
        self._waiting.put((seconds, next(self._numbers), future, key))
        self._threads.submit(self._build_next)
        return future

    def _build_next(self) -> None:
        _, _, future, key = self._waiting.get_nowait()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._compile(key))
        except BaseException as error:  # the caller of result() gets it, as with an executor
            future.set_exception(error)

    def shutdown(self, wait: bool = False) -> None:
        """Drops what has not started, unless it is waited for."""
        self._threads.shutdown(wait, cancel_futures=not wait)


class _LiveBytes:
    """Memory of the compiled grammars that are still referenced."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.RLock()  # a collection may run a finalizer anywhere

    def add(self, grammar: Grammar) -> None:
        """Counts a grammar until it is freed."""
        size = grammar.size_bytes
        self._change(size)
        weakref.finalize(grammar.compiled, self._change, -size).atexit = False

    def _change(self, size: int) -> None:
        with self._lock:
            self.total += size


def _checked(verdict: Verdict) -> Check:
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return Check(0, future)
