"""Tokenization of texts outside of the event loop, with the tokens of prefixes that were seen before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sglang.srt.managers.front.generate_request import RequestError, TextPair
from sglang.srt.managers.front.prefix_tokens import PrefixTokens
from sglang.srt.managers.front.request_preparation import pieces
from sglang.srt.managers.front.worker_threads import WorkerThreads, num_long_threads
from sglang.srt.utils.hf_tokenizer import Tokenizer, TokenizerError

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters from which a text is tokenized in a thread, so that the event loop goes on."""
TEXT_CHARS = 64
"""Characters that count for each of several texts by itself: the call of the tokenizer costs as much."""
LONG_WORK = 1 << 16
"""Characters from which a text counts as long work for the threads, and for the processes of chat templates."""
EXACT_COUNT_CHARS = 1 << 21
"""Longest text in characters whose tokens are counted exactly, in one call."""


class TextEncoder:
    """Tokenizes the texts of calls, short ones at once and long ones in threads."""

    def __init__(self, tokenizer: Tokenizer | None, num_replicas: int) -> None:
        """tokenizer: None with --skip-tokenizer-init."""
        self._tokenizer = tokenizer
        self._prefixes = None if tokenizer is None else PrefixTokens(tokenizer)
        if tokenizer is not None:
            tokenizer.copy_for_event_loop()
        self._threads = WorkerThreads(1 + num_long_threads(num_replicas), "tokenize", num_short=1)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Raises RequestError without a tokenizer."""
        if self._tokenizer is None or self._prefixes is None:
            raise RequestError("The server runs with --skip-tokenizer-init.")
        with _as_request_errors():
            if len(text) < LONG_TEXT:
                return self._tokenizer.encode(text, add_special_tokens)
            return await self.in_thread(len(text), self._prefixes.encode, text, add_special_tokens)

    async def encode_pair(self, pair: TextPair) -> tuple[list[int], int]:
        """Returns the token ids of a pair of texts, and the first of the second text; 0 if the model does not tell them
        apart. Raises RequestError like `encode`."""
        if self._tokenizer is None:
            raise RequestError("The server runs with --skip-tokenizer-init.")
        size = len(pair.first) + len(pair.second)
        with _as_request_errors():
            if size < LONG_TEXT:
                return self._tokenizer.encode_pair(*pair)
            return await self.in_thread(size, self._tokenizer.encode_pair, *pair)

    async def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text by itself, without special tokens. Raises RequestError like `encode`."""
        if self._tokenizer is None:
            raise RequestError("The server runs with --skip-tokenizer-init.")
        size = sum(map(len, texts)) + TEXT_CHARS * len(texts)
        with _as_request_errors():
            if size < LONG_TEXT:
                return self._tokenizer.encode_each(texts)
            return await self.in_thread(size, self._tokenizer.encode_each, texts)

    async def count_tokens(self, text: str, enough: float = math.inf) -> int:
        """Counts the tokens of a text without special ones. The count is exact up to EXACT_COUNT_CHARS; beyond it, it
        may be a few too high for each separately tokenized piece, and stops at `enough`. Raises RequestError like
        `encode`."""
        if len(text) <= EXACT_COUNT_CHARS:
            return len(await self.encode(text, add_special_tokens=False))
        count = 0
        for piece in pieces(text):
            count += len(await self.encode(piece, add_special_tokens=False))
            if count > enough:
                break
        return count

    async def in_thread(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Calls `function` in a worker thread. size: about how many characters it handles; calls with few pass those
        with many."""
        return await asyncio.wrap_future(self._threads.submit(size >= LONG_WORK, lambda _: function(*args)))

    def forget_prefixes(self) -> None:
        """Forgets the tokens of all prefixes."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()


@contextmanager
def _as_request_errors() -> Iterator[None]:
    """Converts the errors of a tokenizer to RequestError."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise RequestError("The text holds half of a surrogate pair, which is no character.") from None
    except TokenizerError as error:
        raise RequestError(f"The model's tokenizer fails on this text: {error}") from None
