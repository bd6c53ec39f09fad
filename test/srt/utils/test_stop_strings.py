from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.utils.stop_strings import MAX_REGEX_HOLD, StopHold, longest_match, search

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=500)
@given(tokens=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12), stops=STOPS)
def test_a_stop_string_never_shows(tokens: list[str], stops: list[str]) -> None:
    """Against the definition: generate until the text contains a stop string, print what is before the earliest one."""
    hold, text, shown = StopHold(stops, []), "", ""
    for token in tokens:
        before, text = text, text + token
        matched = next((stop for stop in stops if stop in text), None)
        if matched is not None:
            shown += hold.finish("", token, matched)
            assert shown == text[: text.find(matched, max(0, len(before) - len(matched) + 1))]
            return
        shown += hold.push(token)
        assert text.startswith(shown)
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
    assert shown + hold.finish("", "", None) == text


def test_holds_no_more_than_needed() -> None:
    hold = StopHold(["<end>"], [])
    assert [hold.push(piece) for piece in ("a <", "en", "x", "<e")] == ["a ", "", "<enx", ""]
    assert hold.finish("", "", None) == "<e"


def test_an_occurrence_that_did_not_count_stays() -> None:
    """With min_new_tokens an early stop string is passed over."""
    hold = StopHold(["."], [])
    assert hold.finish("a. b", ". c", ".") == "a. b"


def test_regex() -> None:
    hold = StopHold([], ["[0-9]{3}"])
    assert hold.push("abcd") == "ab"
    assert hold.push("12") == "cd"
    assert hold.finish("", "345", "[0-9]{3}") == ""
    assert longest_match("a{2,5}b?") == 6
    assert longest_match("a*") == MAX_REGEX_HOLD


def test_an_unknown_match_cuts_nothing() -> None:
    assert StopHold(["x"], []).finish("abc", "d", "<special>") == "abcd"


RUNAWAY = r"(a|aa)+$"
"""Needs exponential time on a long run of a's that ends otherwise."""


def test_a_pattern_that_takes_too_long_is_given_up() -> None:
    text = "a" * 60 + "b"
    assert search("a+b", text) and not search("c", text)
    with pytest.raises(TimeoutError):
        search(RUNAWAY, text)
    hold = StopHold([], [RUNAWAY])
    assert hold.finish(text, "b", RUNAWAY) == text + "b"
