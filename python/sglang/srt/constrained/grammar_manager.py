"""Grammars for requests without ever blocking the scheduler: compiled in threads, cached, asked for by polling."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Protocol

from sglang.srt.constrained.grammar import Grammar, GrammarError, GrammarKey

logger = logging.getLogger(__name__)


class Compiler(Protocol):
    def load(self) -> None: ...

    def compile(self, key: GrammarKey) -> Grammar: ...


class PendingGrammar:
    """A grammar that a request waits for."""

    def __init__(self, future: Future[Grammar], deadline: float, clock: Callable[[], float]) -> None:
        self._future = future
        self._deadline = deadline
        self._clock = clock

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done() or self._clock() >= self._deadline

    def result(self) -> Grammar:
        """The request's own grammar, at its start; waits for it. GrammarError if it is invalid or took too long."""
        wait([self._future], timeout=max(0.0, self._deadline - self._clock()))
        if not self._future.done():
            raise GrammarError("the grammar took too long to compile; simplify it.")
        return self._future.result().fresh()


class GrammarManager:
    """One for a scheduler. Requests with the same grammar share one compilation; errors are remembered as well."""

    def __init__(
        self,
        compiler: Compiler | None,
        max_cached: int = 128,
        num_threads: int = 2,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compiler None: the server runs without grammars and every request for one fails."""
        self._compiler = compiler
        self._max_cached = max_cached
        self._timeout_s = timeout_s
        self._clock = clock
        self._cache: OrderedDict[GrammarKey, Future[Grammar]] = OrderedDict()
        self._load_lock = Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")

    def request(self, key: GrammarKey) -> PendingGrammar:
        """Starts the compilation unless it is cached or under way. Does not block."""
        future = self._cache.get(key)
        if future is None:
            future = self._threads.submit(self._compile, key)
            self._cache[key] = future
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return PendingGrammar(future, self._clock() + self._timeout_s, self._clock)

    def _compile(self, key: GrammarKey) -> Grammar:
        if self._compiler is None:
            raise GrammarError("this server was started with --grammar-backend none.")
        try:
            with self._load_lock:
                self._compiler.load()
        except Exception as error:  # the request fails, the server goes on
            logger.exception("Grammars are not available for this tokenizer")
            raise GrammarError(f"grammars are not available for this tokenizer: {error}") from error
        return self._compiler.compile(key)

    def num_cached(self) -> int:
        return len(self._cache)

    def clear(self) -> None:
        self._cache.clear()

    def shutdown(self) -> None:
        """Drops what has not started; a compilation that runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
