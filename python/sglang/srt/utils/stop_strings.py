"""Stop strings: finds them in text, holds back text that may become one, and cuts the text where they begin.

Special tokens are spelled out in this text (`text_stream.SpelledStream`), whether or not they print. Patterns come from
clients: their size was checked before (`sampling.limits`), they are compiled in the process that uses them, and
searched by a library that can time out, because a pattern may need exponential time.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import regex

from sglang.srt.utils.allowance import Allowance
from sglang.srt.utils.text_stream import TextDelta

REGEX_WINDOW = 4096
"""Characters at the end of the text in which a stop_regex is searched, to bound its cost a token."""
SEARCH_BURST_S = 0.05
SEARCH_REFILL_S = 0.001
"""Seconds a token for searching: common patterns take microseconds."""
SHARED_BURST_S = 0.1
SHARED_REFILL_S = 0.00005
"""Seconds at once and a token that all sequences of a process may search together before `BUSY_SEARCH_S` holds."""
BUSY_SEARCH_S = 0.002
"""Seconds at once for a sequence where others have used up what all share: the samples of one call, which come to the
same text in the same step, may otherwise hold up that step for seconds."""
FINISH_SEARCH_S = 0.005
"""Seconds to find again where a match begins."""
MAX_REGEX_HOLD = 256
"""Characters held back for a stop regex whose matches have no small upper bound."""


@functools.lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Compiles a stop pattern, which takes up to 10 ms and 1 MB; cached, since samples and prompts of a call share
    patterns, while the library's own cache would hold hundreds of clients' patterns. Raises ValueError for what the
    check of the request, which knows Python's own syntax, accepted."""
    try:
        return regex.compile(pattern, cache_pattern=False)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"stop_regex is not a regular expression: {error}, got {pattern!r}.") from None


class StopSearch:
    """Finds stop strings in the growing text of one sequence."""

    __slots__ = ("_allowance", "_keep", "_patterns", "_shared", "_stop", "_tail")

    def __init__(
        self,
        stop: Sequence[str],
        stop_regex: Sequence[str],
        allowance: Allowance | None = None,
        shared: Allowance | None = None,
    ) -> None:
        """shared: allowance of all sequences together, as `shared_allowance` makes it; None: there is no limit of all.
        Raises ValueError for a pattern that cannot be compiled."""
        self._stop = stop
        self._patterns = [(pattern, compile_pattern(pattern)) for pattern in stop_regex]
        self._keep = max(REGEX_WINDOW if stop_regex else 0, max(map(len, stop), default=1) - 1)
        self._tail = ""
        self._allowance = allowance or Allowance(SEARCH_BURST_S, SEARCH_REFILL_S)
        self._shared = shared or Allowance(math.inf, 0.0)

    def push(self, text: str) -> str | None:
        """Returns the stop string, or stop regex as given, that the text now contains. Raises TimeoutError when
        searching the patterns takes too long."""
        text = self._tail + text
        for stop in self._stop:
            if stop in text:
                return stop
        self._tail = text[max(0, len(text) - self._keep) :]
        return self._push_patterns(text) if self._patterns else None

    def _push_patterns(self, text: str) -> str | None:
        allowance, shared = self._allowance, self._shared
        allowance.refill()
        shared.refill()
        text = text[-REGEX_WINDOW:]
        for source, pattern in self._patterns:
            left_s = min(allowance.left_s, BUSY_SEARCH_S - allowance.spent_s) if shared.exhausted else allowance.left_s
            if left_s <= 0:
                raise TimeoutError
            with allowance, shared:
                if pattern.search(text, timeout=left_s) is not None:
                    return source
        return None


def shared_allowance() -> Allowance:
    """Returns an allowance for the `StopSearch` objects of a process to share."""
    return Allowance(SHARED_BURST_S, SHARED_REFILL_S)


class PrefixTracker:
    """Tracks how much of a stop string the end of a text spells, with the Knuth-Morris-Pratt automaton: four bytes a
    character of the stop string, constant time a character of text on average."""

    __slots__ = ("_failure", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        """Longest end of the text that is a beginning of the stop string, but not all of it."""
        failure = array("i", [0])
        length = 0
        for char in stop[1:]:
            while length and stop[length] != char:
                length = failure[length - 1]
            length += stop[length] == char
            failure.append(length)
        self._failure = failure

    def push(self, text: str) -> None:
        """Updates `length` with further text."""
        stop, failure, length = self._stop, self._failure, self.length
        if not length and stop[0] not in text:
            return
        for char in text:
            while length and stop[length] != char:
                length = failure[length - 1]
            length += stop[length] == char
            if length == len(stop):
                length = failure[-1]
        self.length = length


class StopHold:
    """Holds back the end of one sequence's text while it might be the beginning of a stop string.

    The scheduler decides that a sequence stops; this keeps text of the stop from being printed before.
    """

    __slots__ = ("_length", "_patterns", "_pieces", "_regex_hold", "_trackers")

    def __init__(self, stop: Sequence[str], stop_regex: Sequence[str], longest_match: int) -> None:
        """longest_match: upper bound of the length of a match of `stop_regex`. Raises ValueError for a pattern that
        cannot be compiled."""
        self._trackers = [PrefixTracker(text) for text in stop]
        self._patterns = {pattern: compile_pattern(pattern) for pattern in stop_regex}
        self._regex_hold = min(longest_match, MAX_REGEX_HOLD) - 1 if stop_regex else 0
        self._pieces: deque[TextDelta] = deque()
        self._length = 0

    def push(self, pieces: Iterable[TextDelta]) -> str:
        """Adds text; returns the part that can no longer belong to a stop string."""
        self._append(pieces)
        if not self._length:
            return ""
        keep = max(self._regex_hold, max((tracker.length for tracker in self._trackers), default=0))
        return self._take(self._length - keep)

    def finish(self, pieces: Iterable[TextDelta], last: Iterable[TextDelta], matched: str | None) -> str:
        """Returns the rest of the printed text, cut where the stop `matched` (a stop string, or a stop regex as given)
        begins; None: uncut.

        `last` is the text of the sequence's last token (`pieces` come before it), in which the match ends; earlier
        occurrences did not count.
        """
        self._append(pieces)
        last_start = self._length
        self._append(last)
        if matched is None:
            return self._take(self._length)
        whole = "".join(piece.text for piece in self._pieces)
        return self._take(self._find(whole, matched, last_start))

    def _append(self, pieces: Iterable[TextDelta]) -> None:
        for piece in pieces:
            if piece.text:
                self._pieces.append(piece)
                self._length += len(piece.text)
                for tracker in self._trackers:
                    tracker.push(piece.text)

    def _take(self, length: int) -> str:
        """Removes `length` characters from the front; returns those that print."""
        taken = []
        while length > 0:
            text, prints = self._pieces.popleft()
            if len(text) > length:
                self._pieces.appendleft(TextDelta(text[length:], prints))
                text = text[:length]
            if prints:
                taken.append(text)
            length -= len(text)
            self._length -= len(text)
        return "".join(taken)

    def _find(self, whole: str, matched: str, last_start: int) -> int:
        pattern = self._patterns.get(matched)
        if pattern is None:
            start = whole.find(matched, max(0, last_start - len(matched) + 1))
            start = start if start >= 0 else whole.rfind(matched)
            return start if start >= 0 else len(whole)
        begin = max(0, len(whole) - REGEX_WINDOW)  # before it the scheduler did not search
        match_start = len(whole)
        try:
            for hit in pattern.finditer(whole[begin:], timeout=FINISH_SEARCH_S):
                match_start = begin + hit.start()
                if begin + hit.end() > last_start:
                    break
        except TimeoutError:
            return len(whole)
        return match_start
