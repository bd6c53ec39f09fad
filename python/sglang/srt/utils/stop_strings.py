"""Stop strings: what must be held back because it may become one, and where to cut.

Patterns come from clients. They are checked as Python's regular expressions and searched by a library that takes the
same syntax and can stop, because a pattern may need exponential time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import regex

if sys.version_info >= (3, 11):
    from re import _parser as regex_parser  # type: ignore[attr-defined]
else:
    import sre_parse as regex_parser

MAX_REGEX_HOLD = 256
"""Characters held back for a stop regex whose matches have no small upper bound."""
SEARCH_LIMIT_S = 0.05
"""For one search; a common pattern takes microseconds."""


class StopHold:
    """Holds back the end of one sequence's text while it might be the beginning of a stop string.

    Who decides that a sequence stops is the scheduler; this keeps text of the stop from being printed before that.
    """

    __slots__ = ("_heads", "_held", "_longest", "_patterns", "_regex_hold")

    def __init__(self, stop: Sequence[str], stop_regex: Sequence[str]) -> None:
        self._heads = frozenset(s[:n] for s in stop for n in range(1, len(s)))
        self._longest = max(map(len, stop), default=1) - 1
        self._patterns = {pattern: regex.compile(pattern) for pattern in stop_regex}
        self._regex_hold = max((longest_match(pattern) for pattern in stop_regex), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can still claim."""
        text = self._held + text
        keep = min(len(text), max(self._regex_hold, self._longest_head(text)))
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def finish(self, text: str, last: str, matched: str | None) -> str:
        """The rest, cut where the stop `matched` (a stop string, or a stop regex as given) begins; None: uncut.

        `last` is the text of the sequence's last token (`text` comes before it): the match ends in there, an earlier
        occurrence is one that did not count.
        """
        text = self._held + text
        whole = text + last
        self._held = ""
        if matched is None:
            return whole
        return whole[: self._find(whole, matched, len(text))]

    def _longest_head(self, text: str) -> int:
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._heads), 0)

    def _find(self, whole: str, matched: str, last_start: int) -> int:
        pattern = self._patterns.get(matched) or regex.compile(regex.escape(matched))
        try:
            hits = list(pattern.finditer(whole, timeout=SEARCH_LIMIT_S))
        except TimeoutError:
            return len(whole)
        ending_late = (hit.start() for hit in hits if hit.end() > last_start)
        return next(ending_late, hits[-1].start() if hits else len(whole))


def search(pattern: str, text: str) -> bool:
    """Whether a client's pattern matches somewhere. Raises TimeoutError after SEARCH_LIMIT_S."""
    return regex.search(pattern, text, timeout=SEARCH_LIMIT_S) is not None


def longest_match(pattern: str) -> int:
    """Upper bound of the length of a match in characters, at most MAX_REGEX_HOLD. Raises re.error."""
    return min(int(regex_parser.parse(pattern).getwidth()[1]), MAX_REGEX_HOLD)
