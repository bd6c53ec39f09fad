from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.scheduler import output
from sglang.srt.sampling.limits import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from sglang.srt.utils.allowance import Allowance
from sglang.srt.utils.stop_strings import (
    MAX_REGEX_HOLD,
    REGEX_WINDOW,
    PrefixTracker,
    StopHold,
    StopSearch,
    compile_pattern,
)
from sglang.srt.utils.text_stream import TextDelta

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def shown(text: str) -> list[TextDelta]:
    return [TextDelta(text, True)]


class Hold:
    """A StopHold over text that prints."""

    def __init__(self, stop: list[str], stop_regex: list[str] | None = None, longest: int = 0) -> None:
        self.hold = StopHold(stop, stop_regex or [], longest)

    def push(self, text: str) -> str:
        return self.hold.push(shown(text))

    def finish(self, text: str, last: str, matched: str | None) -> str:
        return self.hold.finish(shown(text), shown(last), matched)


@settings(deadline=None, max_examples=500)
@given(tokens=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12), stops=STOPS)
def test_a_stop_string_never_shows(tokens: list[str], stops: list[str]) -> None:
    """Against the definition: generate until the text contains a stop string, print what is before the earliest one."""
    hold, search, text, printed = Hold(stops), StopSearch(stops, []), "", ""
    for token in tokens:
        before, text = text, text + token
        matched = next((stop for stop in stops if stop in text), None)
        assert search.push(token) == matched
        if matched is not None:
            printed += hold.finish("", token, matched)
            assert printed == text[: text.find(matched, max(0, len(before) - len(matched) + 1))]
            return
        printed += hold.push(token)
        assert text.startswith(printed)
        rest = text[len(printed) :]
        assert rest == "" or any(stop.startswith(rest) for stop in stops)
    assert printed + hold.finish("", "", None) == text


@settings(deadline=None, max_examples=500)
@given(stop=st.text("ab", min_size=1, max_size=6), pieces=st.lists(st.text("ab", max_size=5), max_size=12))
def test_the_tracker_knows_the_longest_beginning(stop: str, pieces: list[str]) -> None:
    tracker, text = PrefixTracker(stop), ""
    for piece in pieces:
        tracker.push(piece)
        text += piece
        proper = range(min(len(stop) - 1, len(text)), 0, -1)
        assert tracker.length == next((n for n in proper if text.endswith(stop[:n])), 0)


def test_long_stop_strings_take_memory_in_proportion() -> None:
    stops = [f"{i:02}" + "ab" * (MAX_STOP_LENGTH // 2 - 1) for i in range(MAX_STOP_STRINGS)]
    tracemalloc.start()
    hold = StopHold(stops, [], 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * sum(map(len, stops))
    assert hold.push(shown("x" + stops[3][:-1])) == "x"
    assert hold.finish([], shown("b"), stops[3]) == ""


def test_holds_no_more_than_needed() -> None:
    hold = Hold(["<end>"])
    assert [hold.push(piece) for piece in ("a <", "en", "x", "<e")] == ["a ", "", "<enx", ""]
    assert hold.finish("", "", None) == "<e"


def test_an_occurrence_that_did_not_count_stays() -> None:
    """With min_new_tokens an early stop string is passed over."""
    assert Hold(["."]).finish("a. b", ". c", ".") == "a. b"


def test_what_does_not_print_can_be_part_of_a_stop() -> None:
    hold = StopHold(["x<eot>y"], [], 0)
    printed = hold.push([TextDelta("ax", True), TextDelta("<eot>", False)])
    printed += hold.push([TextDelta("z", True), TextDelta("x", True), TextDelta("<eot>", False)])
    printed += hold.finish([], [TextDelta("y", True)], "x<eot>y")
    assert printed == "axz"


def test_regex() -> None:
    hold = Hold([], ["[0-9]{3}"], 3)
    assert hold.push("abcd") == "ab"
    assert hold.push("12") == "cd"
    assert hold.finish("", "345", "[0-9]{3}") == ""
    endless = Hold([], ["a*"], 1 << 30)
    assert len(endless.push("b" * 1000)) == 1000 - MAX_REGEX_HOLD + 1


def test_an_unknown_match_cuts_nothing() -> None:
    assert Hold(["x"]).finish("abc", "d", "<special>") == "abcd"


RUNAWAY = r"(a|aa)+$"
"""Needs exponential time on a long run of a's that ends otherwise."""


def test_a_pattern_that_takes_too_long_is_given_up() -> None:
    text = "a" * 60 + "b"
    with pytest.raises(TimeoutError):
        StopSearch([], [RUNAWAY]).push(text)
    assert Hold([], [RUNAWAY], 1 << 30).finish(text, "b", RUNAWAY) == text + "b"


def test_patterns_that_are_slow_token_after_token_are_given_up() -> None:
    """Each search is within the limit, together they would slow down everybody."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01  # a search takes a tenth of what it may at once, and ten times what it may on average
        return now[0]

    search = StopSearch([], ["x"], Allowance(0.1, 0.001, clock))
    tokens = 0
    with pytest.raises(TimeoutError):
        for _ in range(100):
            assert search.push("a") is None
            tokens += 1
    assert 5 < tokens < 20


def test_the_samples_of_a_call_do_not_search_for_seconds_together() -> None:
    """Each may search five times by itself. Where all are slow in the same step, most search once."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.005
        return now[0]

    shared = Allowance(0.1, 0.0, clock)
    searches = [StopSearch([], ["x"], Allowance(0.05, 0.001, clock), shared) for _ in range(128)]
    given_up: set[int] = set()
    for _ in range(20):
        for number, search in enumerate(searches):
            if number not in given_up:
                try:
                    assert search.push("a") is None
                except TimeoutError:
                    given_up.add(number)
    assert len(given_up) == 128
    assert now[0] < 4  # of 128 * 0.05 s and more


def test_all_requests_of_a_scheduler_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Allowance] = []

    def search(decoder: Any, params: Any, time: Allowance) -> Any:
        shared.append(time)
        return SimpleNamespace(push=lambda token: None)

    monkeypatch.setattr(output, "TextStop", search)
    decoder: Any = object()
    checker = output.StopChecker(decoder)
    for _ in range(2):
        params = SimpleNamespace(stop=(), stop_regex=("x",))
        req: Any = SimpleNamespace(
            output=[1], tokens=[0, 1], stop_ids=(), grammar=None, params=params, text_stop=None, pending_finish=None,
            prompt_len=1, limit=9,
        )  # fmt: skip
        assert checker.finish_reason(req) is None
    assert len(shared) == 2 and shared[0] is shared[1]


def test_a_quick_pattern_goes_on_where_others_have_used_up_the_time() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.0001
        return now[0]

    shared = Allowance(0.0, 0.0, clock)
    search = StopSearch([], ["x"], Allowance(0.05, 0.001, clock), shared)
    assert shared.exhausted
    for _ in range(100):
        assert search.push("a") is None
    assert search.push("x") == "x"


def test_where_a_match_begins_is_searched_like_the_match() -> None:
    """Within the same end of the text, and not beyond the match that ended the sequence."""
    window = rf"\A[\s\S]{{{REGEX_WINDOW}}}\Z"
    assert Hold([], [window], 1 << 30).finish("a" * 5000, "b", window) == "a" * (5001 - REGEX_WINDOW)
    runaway_behind = r"END|(?:(.)|(..))*[\x01\x02](?<=q)"
    assert Hold([], [runaway_behind], 1 << 30).finish("", "END" + "a" * 60, runaway_behind) == ""


def test_few_of_the_clients_patterns_are_kept() -> None:
    """Samples of a prompt share theirs. The library's own cache stays as it is."""
    first = compile_pattern("ab+c")
    assert compile_pattern("ab+c") is first
    for i in range(16):
        compile_pattern(f"x{{{i + 1}}}")
    assert compile_pattern("ab+c") is not first
    with pytest.raises(ValueError, match="not a regular expression"):
        compile_pattern("(")
