"""Prepares the grammars of requests without ever blocking the scheduler, which polls for the results.

1. Verification: the leader has each grammar compiled in another process (`compile_process`), where it may fail, take
   too long or need too much memory. The result is a verdict.
2. Build: every rank compiles its own copy of a verified grammar in a thread. This is known to end, because the same
   compilation has ended in the other process. Compiled grammars are cached.
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
"""Most grammars in the cache."""
MAX_CACHED_BYTES = 256 * MIB
"""Most memory of the compiled grammars in the cache, unless it is a single one."""
MAX_LIVE_BYTES = 1024 * MIB
"""Memory of all compiled grammars of a process, in the cache or used by requests, above which no new one is built."""
MAX_VERDICTS = 4096
"""Most remembered verdicts; the least recently used are forgotten."""
MAX_UNDER_WAY = 1024
"""Most grammars that are being verified or wait for it."""
WAIT_LIMIT_S = 60.0
"""Most seconds from a request's arrival until its grammar is ready."""
SLOW_COMPILE_S = 1.0
"""Grammars whose verification took longer are built in a queue of their own, so that they do not delay others."""

_NO_BACKEND = Verdict(error="This server was started with --grammar-backend none.")
_TOO_LATE = Verdict(
    error=f"The grammar was not ready after {WAIT_LIMIT_S:g} s; simplify it, or send it again when no others wait.",
    status_code=503,  # for waiting; a grammar that itself takes too long is refused earlier, by the compile process
)
_QUEUE_FULL = Verdict(error="Too many grammars wait to be compiled; send the request again later.", status_code=503)
_NOT_BUILT = Verdict(error="The grammar could not be built; the log of the server says why.", status_code=500)
_MEMORY_FULL = Verdict(error="The grammars in use fill their memory; send the request again later.", status_code=503)


class Verifier(Protocol):
    """Interface of `CompileClient`."""

    def submit(self, key: GrammarKey) -> Check:
        """Starts the verification of a grammar."""

    def cancel(self, check: Check) -> None:
        """Stops a verification whose request has ended."""

    def close(self) -> None:
        """Ends the process."""


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
    """This rank's build; set once the leader's verdict is good."""


class GrammarManager:
    """The grammars of one scheduler process. Requests with the same grammar share its verification and its build."""

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
        self._checks: OrderedDict[bytes, Check] = OrderedDict()
        """Verifications by digest, under way or finished; the least recently used first."""
        self._under_way: dict[bytes, Check] = {}
        """Verifications that had not finished at the last `keep_only`, or that came later."""
        self._grammars: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        """The cache: builds by digest, under way or finished; the least recently used first."""
        self._has_grown = False
        """Whether the cache may have come to exceed its limits."""
        self._live = _LiveBytes()
        self._news = threading.Event()
        """Leader only: whether a request or a verdict has come since the last `has_new_verdicts`."""
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
        self._news.set()
        if self._verifier is not None:
            pending.check = self._check(self._verifier, pending)
        return pending

    def _check(self, verifier: Verifier, pending: PendingGrammar) -> Check:
        """Returns the grammar's verification, which starts now if there is none."""
        check = self._checks.get(pending.digest)
        if check is None:
            if len(self._under_way) >= MAX_UNDER_WAY:
                return _finished_check(_QUEUE_FULL)
            check = self._checks[pending.digest] = self._under_way[pending.digest] = verifier.submit(pending.key)
            check.verdict.add_done_callback(self._note_verdict)
            if len(self._checks) > MAX_VERDICTS:
                self._forget_oldest_verdict()
        self._checks.move_to_end(pending.digest)
        return check

    def _forget_oldest_verdict(self) -> None:
        """Forgets the least recently used verification that has finished. One under way stays known, so that it is
        shared, and cancelled when nobody waits."""
        finished = (digest for digest, check in self._checks.items() if check.verdict.done())
        self._checks.pop(next(finished, b""), None)

    def has_new_verdicts(self, oldest: PendingGrammar) -> bool:
        """Returns whether `verdict` may return something new for any request: a request or a verdict has come since the
        last call, or the deadline of `oldest`, the grammar that has waited longest, has passed. For the leader."""
        news = self._news.is_set()
        if news:
            self._news.clear()  # before verdicts are read: what comes from now on counts next time
        return news or self._clock() >= oldest.deadline

    def verdict(self, pending: PendingGrammar) -> Verdict | None:
        """Returns the verdict: without an error if the grammar can be built; None if it is not known yet. For the
        leader."""
        if self._backend is None:
            return _NO_BACKEND
        assert pending.check is not None
        if pending.check.verdict.done():
            verdict = pending.check.verdict.result()
            full = not verdict.error and not self._cached(pending.digest) and self._live.total > MAX_LIVE_BYTES
            return _MEMORY_FULL if full else verdict
        return _TOO_LATE if self._clock() >= pending.deadline else None

    def keep_only(self, wanted: Collection[bytes]) -> None:
        """Cancels verifications and builds that no request waits for, and forgets errors that may not occur again, i.e.
        all but status 400. wanted: digests of the grammars that requests wait for. Called when requests have left."""
        for digest, check in list(self._under_way.items()):
            if check.verdict.done():
                del self._under_way[digest]
                verdict = check.verdict.result()
                if verdict.error and verdict.status_code != 400:
                    self._checks.pop(digest, None)
            elif digest not in wanted:
                del self._under_way[digest]
                self._checks.pop(digest, None)
                assert self._verifier is not None
                self._verifier.cancel(check)
        for digest, future in list(self._grammars.items()):
            if digest not in wanted and not future.done() and future.cancel():
                del self._grammars[digest]

    def build(self, pending: PendingGrammar, seconds: float) -> None:
        """Starts compiling a verified grammar, unless it is in the cache. seconds: the time that its verification
        took."""
        future = self._grammars.get(pending.digest)
        if future is None:
            builds = self._slow if seconds > SLOW_COMPILE_S else self._quick
            future = self._grammars[pending.digest] = builds.submit(pending.key, seconds)
            future.add_done_callback(self._note_growth)
            self._has_grown = True
        self._grammars.move_to_end(pending.digest)
        if self._has_grown:
            self._has_grown = False
            self._shrink()
        pending.build = future

    def state(self, pending: PendingGrammar) -> BuildState:
        """Returns the state of a grammar whose `build` was called. On the leader it is FAILED once the deadline has
        passed."""
        assert pending.build is not None
        if pending.build.done():
            return BuildState.READY if pending.build.exception() is None else BuildState.FAILED
        return BuildState.FAILED if self.is_late(pending) else BuildState.RUNNING

    def is_late(self, pending: PendingGrammar) -> bool:
        """Returns whether the deadline has passed, on the leader; False on other ranks."""
        return self._verifier is not None and self._clock() >= pending.deadline

    def built(self, pending: PendingGrammar) -> Grammar:
        """Returns a grammar for this request alone, before its first token. The build's state must be READY."""
        assert pending.build is not None
        return pending.build.result().fresh()

    def failure(self, pending: PendingGrammar) -> Verdict:
        """Returns the reason to refuse the request after a build failed on some rank. It is the server's error, as the
        grammar was verified."""
        assert pending.build is not None
        if not pending.build.done():
            return _TOO_LATE
        if (error := pending.build.exception()) is not None:
            logger.error("A verified grammar could not be built: %r", error)
        if self._grammars.get(pending.digest) is pending.build:  # another request may have begun a new build
            del self._grammars[pending.digest]
        return _NOT_BUILT

    def _note_verdict(self, _: Future[Verdict]) -> None:
        """Makes `has_new_verdicts` return true. Called in other threads."""
        self._news.set()

    def _note_growth(self, _: Future[Grammar]) -> None:
        """Notes that the size of another cached grammar is known. Called in other threads."""
        self._has_grown = True

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
        """Drops all cached grammars and known verdicts. Waiting requests hold their own references and are not
        affected; a build that nobody waits for any more is not cached when it ends."""
        for digest in [digest for digest, check in self._checks.items() if check.verdict.done()]:
            del self._checks[digest]
        self._grammars.clear()

    def num_cached(self) -> int:
        """Returns the number of compiled grammars that are kept."""
        return len(self._grammars)

    def shutdown(self) -> None:
        """Drops work that has not started; a running build ends by itself."""
        self._closed = True
        if self._verifier is not None:
            self._verifier.close()
        for builds in (self._quick, self._slow):
            builds.shutdown()


class _Builds:
    """A thread that compiles grammars. Those with the shortest expected time go first."""

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
        """Runs the queued build with the shortest expected time, in the thread."""
        _, _, future, key = self._waiting.get_nowait()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._compile(key))
        except BaseException as error:  # the caller of result() gets it, as with an executor
            future.set_exception(error)

    def shutdown(self, wait: bool = False) -> None:
        """Ends the thread. wait: after all queued builds; otherwise those that have not started are dropped."""
        self._threads.shutdown(wait, cancel_futures=not wait)


class _LiveBytes:
    """Memory of the compiled grammars that are still referenced."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.RLock()  # garbage collection in `_change` may run a finalizer, which calls `_change`

    def add(self, grammar: Grammar) -> None:
        """Counts a compiled grammar's memory until it is freed."""
        size = grammar.size_bytes
        self._change(size)
        weakref.finalize(grammar.compiled, self._change, -size).atexit = False

    def _change(self, size: int) -> None:
        with self._lock:
            self.total += size


def _finished_check(verdict: Verdict) -> Check:
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return Check(0, future)
