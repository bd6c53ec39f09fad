"""Tokenizes texts without repeating the work for a known beginning: agents send the whole conversation again in every
turn.

A text is cut after tokens that no tokenizer rule reaches across, mostly ends of messages, and the pieces between two
cuts are tokenized one by one. The ids are those of the whole text.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from sglang.srt.utils.hf_tokenizer import Tokenizer

MAX_KEPT_TOKENS = 1 << 23
"""Most tokens of all kept pieces, four bytes each."""
MIN_PIECE_CHARS = 1024
MAX_MARKS = 64
SEARCHED_CHARS = 1 << 14
"""Characters in which marks are searched at a time: a search holds the interpreter, at worst for 0.6 us a character."""


class _Cut(NamedTuple):
    """Position of a cut: it is at `end`, the end of a mark token."""

    mark: int
    """Where the mark token begins."""
    end: int


class PrefixTokens:
    """Cache of tokenized pieces, keyed by a hash of the text up to a piece's end. Safe in several threads."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._marks = _marks(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._marks, key=len, reverse=True))) or "(?!)")
        self._frame = _frame(tokenizer)
        self._lock = threading.Lock()
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()
        """In order of use, the last used piece at the end. The pieces before a piece are used with it and stay longer
        than it."""
        self._num_tokens = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns and raises what `Tokenizer.encode` does."""
        cuts = self._cuts(text)
        if not cuts or (add_special_tokens and self._frame is None):
            return self._tokenizer.encode(text, add_special_tokens)
        keys = _keys(text, cuts)
        known = self._known(keys)
        new = self._tokenized(text, cuts, len(known))
        if new is None:
            return self._tokenizer.encode(text, add_special_tokens)
        self._keep(keys, [*known, *new])
        ids = list(chain(*known, *new))
        before, after = self._frame if add_special_tokens and self._frame else ([], [])
        return [*before, *ids, *after]

    def clear(self) -> None:
        """Forgets all prefixes."""
        with self._lock:
            self._pieces.clear()
            self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens are kept."""
        return self._num_tokens

    def _cuts(self, text: str) -> list[_Cut]:
        cuts, minimum = [], MIN_PIECE_CHARS
        for match in self._matches(text):
            if match.end() >= minimum:
                cuts.append(_Cut(*match.span()))
                minimum = match.end() + MIN_PIECE_CHARS
        return cuts

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yields what `finditer` does, searching a part of the text at a time."""
        overlap = max(map(len, self._marks), default=1) - 1
        start = 0
        while start < len(text):
            end = start + SEARCHED_CHARS
            for match in self._pattern.finditer(text, start, end + overlap):
                if match.start() >= end:
                    break
                yield match
                start = match.end()
            start = max(start, end)

    def _known(self, keys: list[bytes]) -> list[array[int]]:
        """Returns the pieces of the longest known beginning."""
        with self._lock:
            known = []
            for key in keys:
                if (piece := self._pieces.get(key)) is None:
                    break
                known.append(piece)
            return known

    def _tokenized(self, text: str, cuts: list[_Cut], num_known: int) -> list[array[int]] | None:
        """Returns the pieces after the known ones, ending with the rest of the text. Each is tokenized together with
        the mark before it, so that rules for the beginning of a text do not apply. None: a mark was not tokenized as
        one token."""
        starts = [0, *(cut.mark for cut in cuts)][num_known:]
        ends = [*(cut.end for cut in cuts), len(text)][num_known:]
        each = self._tokenizer.encode_each([text[start:end] for start, end in zip(starts, ends, strict=True)])
        pieces = []
        for number, ids in enumerate(each, num_known):
            if number:
                if ids[:1] != [self._mark(text, cuts[number - 1])]:
                    return None
                ids = ids[1:]
            if number < len(cuts) and [*ids[-1:]] != [self._mark(text, cuts[number])]:
                return None
            pieces.append(array("i", ids))
        return pieces

    def _mark(self, text: str, cut: _Cut) -> int:
        return self._marks[text[cut.mark : cut.end]]

    def _keep(self, keys: list[bytes], pieces: list[array[int]]) -> None:
        """Keeps the pieces that have a key (the rest of the text has none). Those at the beginning of a text are
        evicted last."""
        with self._lock:
            for key, piece in reversed(list(zip(keys, pieces, strict=False))):
                if key not in self._pieces:
                    self._num_tokens += len(piece)
                self._pieces[key] = piece
                self._pieces.move_to_end(key)
            while self._num_tokens > self._max_tokens:
                _, piece = self._pieces.popitem(last=False)
                self._num_tokens -= len(piece)


def _keys(text: str, cuts: list[_Cut]) -> list[bytes]:
    """Returns a digest of the text up to each cut."""
    digest, keys, start = hashlib.blake2b(digest_size=16), [], 0
    for cut in cuts:
        digest.update(text[start : cut.end].encode())
        keys.append(digest.copy().digest())
        start = cut.end
    return keys


def _marks(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the tokens after which texts may be cut, with their ids: tokens of conversations that are the same in any
    context, absorb nothing around them, and are not part of another token."""
    added = {token.content: (number, token) for number, token in tokenizer.added_tokens.items()}
    template = tokenizer.chat_template
    written = "".join(template.values()) if isinstance(template, dict) else template or ""
    wanted = {text for text in added if text in written} | set(tokenizer.special_tokens.values())
    plain = [text for text in wanted if text in added and _is_plain(added[text][1])]
    alone = [text for text in plain if not any(text in other for other in added if other != text)]
    return {text: added[text][0] for text in sorted(alone)[:MAX_MARKS]}


def _is_plain(token: Any) -> bool:
    return bool(token.content) and not (token.normalized or token.lstrip or token.rstrip or token.single_word)


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Returns the ids that special tokens add before and after every prompt; None if they depend on the prompt."""
    frames = []
    for text in ("a", "b c d"):
        inner, whole = (tokenizer.encode(text, add_special_tokens=wanted) for wanted in (False, True))
        starts = range(len(whole) - len(inner) + 1)
        start = next((i for i in starts if whole[i : i + len(inner)] == inner), None)
        if start is None:
            return None
        frames.append((whole[:start], whole[start + len(inner) :]))
    return frames[0] if frames[0] == frames[1] else None
