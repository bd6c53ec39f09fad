"""Reads text that arrives in pieces.

Grammars are generators over a `Reader`: they yield when they need more text and go on when it has come. What a method
consumes and passes on depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A grammar: yields where it waits for text, returns what it has read."""
Sink = Callable[[str], None]

SPACE = re.compile(r"\s*")
MAX_SPACE = 512
"""Characters of white space that may stand between the parts of a call."""
_SOME_SPACE = re.compile(rf"\s{{0,{MAX_SPACE + 1}}}")


class Markers:
    """Strings to search for together. None may occur inside of another, except at its end: whichever is complete first
    would win by chance."""

    def __init__(self, *texts: str) -> None:
        for text in texts:
            if not text or any(text in other[:-1] for other in texts):
                raise ValueError(f"marker {text!r} is empty or a part of another one of {texts}")
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.longest = max(map(len, texts), default=0)
        self._longest = max(0, self.longest - 1)
        self._firsts = frozenset(text[0] for text in texts)

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        """Returns the first marker in `text[start:end]`; None if there is none."""
        return self._pattern.search(text, start, end) if self._pattern is not None else None

    def match(self, text: str, start: int, end: int) -> re.Match[str] | None:
        """Returns the marker at `start`; None if none begins there."""
        return self._pattern.match(text, start, end) if self._pattern is not None else None

    def safe_end(self, text: str, start: int, end: int) -> int:
        """Returns the start of the longest end of the text that may be the beginning of a marker; `end` if there is
        none."""
        for cut in range(max(start, end - self._longest), end):
            if text[cut] in self._firsts and self._is_beginning(text[cut:end]):
                return cut
        return end

    def may_begin(self, text: str, start: int, end: int) -> bool:
        """Returns whether the rest of the text is empty or the beginning of a marker."""
        return end - start <= self._longest and (start == end or self._is_beginning(text[start:end]))

    def _is_beginning(self, text: str) -> bool:
        """Returns whether a marker begins with this text, which is not all of it. Markers with the names of arguments
        are long and many, so their beginnings are not kept in a set."""
        return any(marker.startswith(text) and marker != text for marker in self.texts)


@functools.lru_cache(maxsize=1024)
def markers_of(*texts: str) -> Markers:
    """Returns cached `Markers`, for those needed for every argument of a call."""
    return Markers(*texts)


@dataclass(slots=True)
class _Mark:
    """A position that was marked, `offset` characters into the output. `pieces`: text from there on that the reader no
    longer holds; the rest begins at index `start`."""

    offset: int
    start: int
    pieces: list[str] = field(default_factory=list)


class Reader:
    """The available text from the reading position on. `mark` and `since_mark` keep what a grammar consumes, in case it
    turns out to be something else; marks may be nested, and the innermost one counts. With a fence, the text seems to
    end where one of its markers begins."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._end = 0
        """Index at which the text ends for now."""
        self._offset = 0
        self._ended = False
        self._whole = False
        self._fence: Markers | None = None
        self._no_fence_before = 0
        """Characters of the output that were searched for the fence."""
        self._marks: list[_Mark] = []
        self.unclosed_from: dict[str, int] = {}
        """Quote that a grammar has looked for up to the end of the text -> the offset behind which no other closes
        it."""

    def feed(self, text: str) -> None:
        """Appends text; what was read before is dropped, but for what follows a mark."""
        for mark in self._marks:
            mark.pieces.append(self._text[mark.start : self._position])
            mark.start = 0
        self._offset += self._position
        self._text = self._text[self._position :] + text
        self._position = 0
        self._find_end()

    def end(self) -> None:
        """Notes that no more text follows."""
        self._whole = True
        self._find_end()

    # --- a part of the text -------------------------------------------------------------------------------------------

    def fence(self, markers: Markers) -> None:
        """Ends the text before the first of the markers until `lift_fence`; pass the same markers in every call."""
        self._fence = markers
        self._find_end()

    def lift_fence(self) -> None:
        """Lets reading pass the markers of `fence` again."""
        self._fence = None
        self._find_end()

    def _find_end(self) -> None:
        self._end, self._ended = len(self._text), self._whole
        if self._fence is None:
            return
        start = max(self._position, self._no_fence_before - self._offset)
        match = self._fence.search(self._text, start, self._end)
        if match is not None:
            self._end, self._ended = match.start(), True
        elif not self._whole:
            self._end = self._fence.safe_end(self._text, start, self._end)
        self._no_fence_before = self._offset + self._end

    @property
    def offset(self) -> int:
        """Returns the characters consumed so far."""
        return self._offset + self._position

    # --- memory of what was read --------------------------------------------------------------------------------------

    def num_held(self, skipped: int) -> int:
        """Returns the characters that may be read again: those since the oldest mark without the `skipped` oldest ones,
        or else those that were not read yet."""
        begin = self._marks[skipped].offset if len(self._marks) > skipped else self.offset
        return self._offset + len(self._text) - begin

    def mark(self) -> None:
        """Remembers the present position, until `unmark`. Marks nest."""
        self._marks.append(_Mark(self.offset, self._position))

    def since_mark(self) -> str:
        """Returns the text from the latest mark to the present position."""
        return self._since(self._marks[-1])

    def _since(self, mark: _Mark) -> str:
        return "".join(mark.pieces) + self._text[mark.start : self._position]

    def unmark(self) -> None:
        """Forgets the latest mark."""
        self._marks.pop()

    def rewind(self) -> None:
        """Returns to the mark, which is removed."""
        text = self._since(self._marks.pop())
        for mark in self._marks:
            mark.pieces, mark.start = [self._since(mark).removesuffix(text)], 0
        self._offset = self.offset - len(text)
        self._text, self._position = text + self._text[self._position :], 0
        self._find_end()

    # --- reading ------------------------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """Returns the next character without consuming it; "" at the end."""
        while self._position >= self._end:
            if self._ended:
                return ""
            yield
        return self._text[self._position]

    def skip(self, count: int) -> None:
        """Consumes `count` characters, which must be available."""
        self._position += count

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Passes on all characters that `pattern` (a starred class) matches, and returns the next one like `peek`."""
        while True:
            match = pattern.match(self._text, self._position, self._end)
            assert match is not None
            if match.end() > self._position:
                sink(match[0])
                self._position = match.end()
            if self._position < self._end:
                return self._text[self._position]
            if self._ended:
                return ""
            yield

    def space(self) -> Steps[str]:
        """Consumes white space and returns the next character like `peek`."""
        return (yield from self.run(SPACE, ignore))

    def peek_marker(self, markers: Markers) -> Steps[str | None]:
        """Returns the marker that comes next without consuming it; None if there is none."""
        while True:
            match = markers.match(self._text, self._position, self._end)
            if match is not None:
                return match[0]
            if self._ended or not markers.may_begin(self._text, self._position, self._end):
                return None
            yield

    def take_marker(self, markers: Markers) -> Steps[str | None]:
        """Consumes and returns the marker that comes next; None, consuming nothing, if there is none."""
        marker = yield from self.peek_marker(markers)
        self.skip(len(marker or ""))
        return marker

    def take_marker_after_space(self, markers: Markers) -> Steps[str | None]:
        """Consumes white space and a following marker, which it returns; None, consuming nothing, if there is none."""
        while True:
            match, is_known = self._behind_space(markers, self._position)
            if match is not None:
                self._position = match.end()
                return match[0]
            if is_known:
                return None
            yield

    def _behind_space(self, markers: Markers, start: int) -> tuple[re.Match[str] | None, bool]:
        """Returns the marker after the white space at `start`, and whether the answer is certain."""
        space = _SOME_SPACE.match(self._text, start, self._end)
        assert space is not None
        match = markers.match(self._text, space.end(), self._end)
        too_long = space.end() - start > MAX_SPACE
        waits = not (self._ended or too_long) and markers.may_begin(self._text, space.end(), self._end)
        return match, match is not None or not waits

    def until(self, markers: Markers, sink: Sink, behind: Mapping[str, Markers] | None = None) -> Steps[str | None]:
        """Passes on the text before the next marker and returns the marker without consuming it; None if the text ends.

        behind: marker -> markers one of which (or the end of the text) must follow it, apart from white space;
        otherwise it is text.
        """
        while True:
            match = markers.search(self._text, self._position, self._end)
            cut = match.start() if match is not None else self._end
            if match is None and not self._ended:
                cut = markers.safe_end(self._text, self._position, self._end)
            if cut > self._position:
                sink(self._text[self._position : cut])
                self._position = cut
            if match is not None:
                counts = self._counts(match, behind or {})
                if counts:
                    return match[0]
                if counts is False:
                    sink(self._text[cut])
                    self._position = cut + 1
                    continue
            elif self._ended:
                return None
            yield

    def _counts(self, match: re.Match[str], behind: Mapping[str, Markers]) -> bool | None:
        """Returns whether what follows makes this match a marker; None: more text is needed."""
        if match[0] not in behind:
            return True
        follower, is_known = self._behind_space(behind[match[0]], match.end())
        if not is_known:
            return None
        return follower is not None or (self._ended and not self._text[match.end() : self._end].strip())

    def word(self, markers: Markers, limit: int) -> Steps[str | None]:
        """Consumes and returns the text before the next marker, which stays. Returns None, consuming nothing, if it is
        longer than `limit` or the text ends. Looks no further than `limit`, so many attempts in one text cost only a
        multiple of its length."""
        while True:
            start = self._position
            end = start + limit + markers.longest
            match = markers.search(self._text, start, min(end, self._end))
            if match is not None:
                self._position = match.start()
                return self._text[start : match.start()]
            if self._ended or self._end >= end:
                return None
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Passes on everything to the end."""
        while True:
            if self._position < self._end:
                sink(self._text[self._position : self._end])
                self._position = self._end
            if self._ended:
                return
            yield


def ignore(_: str) -> None:
    """Discards text."""
