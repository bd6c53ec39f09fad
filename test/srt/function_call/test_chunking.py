"""An output means the same however it is cut into pieces.

`make test` tries a tenth of the random outputs and cuts of `make thorough`, the first ones.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.events import ArgumentsDelta, CallEnd, Event, ReasoningDelta, TextDelta
from sglang.srt.function_call.messages import Start
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.reader import Markers
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from srt.function_call.outputs import MESSAGE_FORMATS, TOOLS, WRITERS, random_call, random_output, random_text

OUTPUTS_PER_FORMAT = 300
PAIRS_PER_FORMAT = 2000
REASONED_PER_FORMAT = 200
SHORT_TEXT = 2048
"""Characters: several times what a call's header may have."""
SHARES = pytest.mark.parametrize(
    "share", [pytest.param(0.1, id="quick"), pytest.param(1.0, id="long", marks=pytest.mark.thorough)]
)
_DELTAS = (TextDelta, ReasoningDelta, ArgumentsDelta)


def new_parser(calls: str, reasoning: str | None = None, **options: Any) -> OutputParser:
    if calls in MESSAGE_FORMATS:
        reasoning = calls
    return OutputParser(
        calls=TOOL_CALL_FORMATS[calls],
        tools=TOOLS,
        reasoning=None if reasoning is None else REASONING_FORMATS[reasoning],
        **options,
    )


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of the same kind as one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, _DELTAS) and type(last) is type(event):
            assert event.text
            result[-1] = event._replace(text=last.text + event.text)  # type: ignore[union-attr]
        else:
            result.append(event)
    return result


def run(parser: OutputParser, pieces: Sequence[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def random_cuts(rng: random.Random, text: str) -> list[str]:
    return cut(text, [rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12))])


@SHARES
@pytest.mark.parametrize("name", WRITERS)
def test_random_outputs_in_random_pieces(name: str, share: float) -> None:
    rng = random.Random(name)
    for _ in range(round(share * OUTPUTS_PER_FORMAT)):
        text = random_output(rng, name)
        whole = run(new_parser(name), [text])
        for pieces in (list(text), random_cuts(rng, text)):
            assert run(new_parser(name), pieces) == whole, pieces


@SHARES
@pytest.mark.parametrize("start", [Start.TEXT, Start.THOUGHTS])
@pytest.mark.parametrize("name", MESSAGE_FORMATS)
def test_bodies_that_the_prompt_has_begun(name: str, start: Start, share: float) -> None:
    rng = random.Random(name)
    for _ in range(round(share * OUTPUTS_PER_FORMAT)):
        text = random_text(rng) + random_output(rng, name)
        whole = run(new_parser(name, start=start), [text])
        for pieces in (list(text), random_cuts(rng, text)):
            assert run(new_parser(name, start=start), pieces) == whole, pieces


@SHARES
@pytest.mark.parametrize("name", WRITERS)
def test_pairs_of_cuts(name: str, share: float) -> None:
    """All of a short output, and as many of a longer one."""
    text = WRITERS[name].message("so:", WRITERS[name].calls([("get_weather", {"city": 'a"'})]), "ok")
    whole = run(new_parser(name), [text])
    assert any(not isinstance(event, TextDelta) for event in whole)
    pairs = list(itertools.combinations(range(1, len(text)), 2))
    for places in random.Random(name).sample(pairs, min(len(pairs), round(share * PAIRS_PER_FORMAT))):
        assert run(new_parser(name), cut(text, places)) == whole, places


@SHARES
@pytest.mark.parametrize("name", WRITERS)
def test_every_truncation(name: str, share: float) -> None:
    """An output that breaks off is read, and what was sent before does not depend on what would have come.

    The quick run has one output, and cuts only some of its beginnings into characters.
    """
    rng = random.Random(name)
    for _ in range(round(2 * share) or 1):
        text = WRITERS[name].message(random_text(rng), WRITERS[name].calls([random_call(rng), random_call(rng)]), "end")
        running = new_parser(name)
        sent: list[Event] = []
        for end in range(len(text) + 1):
            whole = run(new_parser(name), [text[:end]])
            if end % round(1 / share) == 0:
                assert run(new_parser(name), list(text[:end])) == whole
            assert _is_prefix(joined(sent), whole)
            sent += running.push(text[end : end + 1])


def _is_prefix(events: list[Event], whole: list[Event]) -> bool:
    if not events:
        return True
    *first, last = events
    if first != whole[: len(first)] or len(whole) <= len(first):
        return False
    other = whole[len(first)]
    if isinstance(last, _DELTAS):
        return type(other) is type(last) and other.text.startswith(last.text)  # type: ignore[union-attr]
    return last == other


@SHARES
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", [{}, {"separate": False}, {"whole_thoughts": True}])
@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name not in MESSAGE_FORMATS])
def test_reasoning_in_random_pieces(name: str, options: dict[str, bool], inside: bool, share: float) -> None:
    rng = random.Random(name)
    form = REASONING_FORMATS[name]
    begin, end = form.markers
    for _ in range(round(share * REASONED_PER_FORMAT)):
        text = rng.choice(("", " ", "\n")) + rng.choice((begin, "", begin[:3])) + rng.choice(("\n", "")) + rng.choice(
            ("thinking ", "<think", "a\n\nb", end[:-1], "", random_output(rng, "glm45"))
        ) + rng.choice((end, "\n" + end + "\n\n", "")) + random_output(rng, "glm45")  # fmt: skip
        text = text[: rng.choice((len(text), rng.randrange(len(text) + 1)))]
        whole = run(new_parser("glm45", name, inside=inside, **options), [text])
        for pieces in (list(text), random_cuts(rng, text)):
            assert run(new_parser("glm45", name, inside=inside, **options), pieces) == whole, pieces


@SHARES
@pytest.mark.parametrize("name", WRITERS)
def test_nonsense_made_of_the_formats_own_pieces(name: str, share: float) -> None:
    rng = random.Random(name)
    writer = WRITERS[name]
    text = writer.message("x", writer.calls([("get_weather", {"city": "a", "tags": ["b"]}), ("now", {})]), "y")
    pieces = re.findall(r"<[^>]*>|\[[A-Z_]+\]|\w+|\s|.", text)
    for _ in range(round(share * OUTPUTS_PER_FORMAT)):
        soup = "".join(rng.choice(pieces) for _ in range(rng.randrange(60)))
        whole = run(new_parser(name), [soup])
        for parts in (list(soup), random_cuts(rng, soup)):
            assert run(new_parser(name), parts) == whole, parts


@SHARES
@pytest.mark.parametrize("name", [name for name in WRITERS if name not in MESSAGE_FORMATS])
def test_nothing_is_lost(name: str, share: float) -> None:
    """Text and the calls' sources are the output, but for white space and the section's end."""
    rng = random.Random(name)
    form = TOOL_CALL_FORMATS[name]
    assert isinstance(form, CallFormat)
    section_ends = [end for _, end in form.sections]
    for _ in range(round(share * OUTPUTS_PER_FORMAT)):
        output = random_output(rng, name)
        events = run(new_parser(name), [output])
        kept = "".join(
            event.source if isinstance(event, CallEnd) else event.text
            for event in events
            if isinstance(event, CallEnd | TextDelta)
        )
        ends = ("<|python_end|>", "<|python_start|>", "[TOOL_CALLS]", "<|tools_suffix|>", "<|tool_call_end|>")
        silent = (*section_ends, *ends, "]", ",", ";")
        assert _without(kept, silent) == _without(output, silent)


@pytest.mark.parametrize("name", WRITERS)
def test_the_work_grows_with_the_text_and_not_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that begin calls again and again and never end one: how many characters are searched for markers."""
    searched = 0

    def counted(self: Markers, text: str, start: int, end: int) -> re.Match[str] | None:
        nonlocal searched
        match = search(self, text, start, end)
        searched += (min(len(text), end) if match is None else match.end()) - start
        return match

    search = Markers.search
    monkeypatch.setattr(Markers, "search", counted)
    call = WRITERS[name].calls([("get_weather", {"city": "a"})])
    for part in (*WRITERS[name].markers, *(call[:end] for end in range(10, len(call), 16))):
        amounts = []
        for length in (SHORT_TEXT, 4 * SHORT_TEXT):
            searched = 0
            text = (part * (length // len(part) + 1))[:length]
            run(new_parser(name), [text])
            run(new_parser(name, "glm45"), ["<think>" + text])
            amounts.append(searched)
        assert amounts[1] <= 6 * max(amounts[0], SHORT_TEXT), part


def _without(text: str, parts: Iterable[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return "".join(text.split())
