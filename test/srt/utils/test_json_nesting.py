"""How deeply JSON may be nested, counted without what strings hold."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.http_body import Body, parse_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.utils import json_nesting
from sglang.srt.utils.json_nesting import (
    MAX_JSON_NESTING,
    count_brackets,
    count_commas,
    has_more_names,
    nests_too_deeply,
    read_json,
)


class Anything(Body):
    value: Any = None


def _nested(levels: int) -> str:
    return '{"value":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


def test_the_limit_is_read_and_one_level_more_is_refused() -> None:
    parse_body(_nested(MAX_JSON_NESTING).encode(), Anything)
    read_json(_nested(MAX_JSON_NESTING))
    with pytest.raises(ApiError, match=f"more than {MAX_JSON_NESTING} levels deep; make it flatter") as refused:
        parse_body(_nested(MAX_JSON_NESTING + 1).encode(), Anything)
    assert refused.value.status == 400
    with pytest.raises(ValueError, match=f"more than {MAX_JSON_NESTING} levels deep; make it flatter"):
        read_json(_nested(MAX_JSON_NESTING + 1))


@pytest.mark.parametrize("levels", [1_000, 200_000])
def test_levels_of_fields_that_nobody_reads_count(levels: int) -> None:
    body = b'{"ignored":' + b'{"a":' * levels + b"1" + b"}" * levels + b"}"
    with pytest.raises(ApiError, match="flatter"):
        parse_body(body, Anything)


@pytest.mark.parametrize("text", ["[" * 500, '"' + "[" * 500, '\\"' + "{" * 500, "\\" * 3 + '"' + "[" * 500, "\\\\"])
def test_brackets_within_strings_do_not_count(text: str) -> None:
    parse_body(msgspec.json.encode({"value": [text, text + "\\", {text: "["}]}), Anything)


def test_many_values_beside_each_other_are_not_deep() -> None:
    parse_body(msgspec.json.encode({"value": [[{}]] * 100_000}), Anything)


def _value(random: Random, levels: int) -> Any:
    kind = random.randrange(5) if levels else 0
    text = "".join(random.choices('[]{}"\\aü,\n', k=random.randrange(6)))
    if kind < 2:
        return text
    entries = [_value(random, levels - 1) for _ in range(random.randrange(4))]
    return entries if kind < 4 else {f"{text}{index}": entry for index, entry in enumerate(entries)}


def _levels(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(_levels, value.values() if isinstance(value, dict) else value), default=0)


@pytest.mark.parametrize("block", [1, 3, 16])
def test_depth_is_that_of_the_value_wherever_blocks_end(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_nesting, "_BLOCK", block)
    random = Random(block)
    for _ in range(300):
        value = _value(random, 5)
        levels = _levels(value)
        for raw in (json.dumps(value).encode(), msgspec.json.encode(value)):
            assert count_brackets(raw) == raw.count(b"[") + raw.count(b"{")
            assert count_commas(raw) == raw.count(b",")
            for limit in (max(levels - 1, 0), levels):
                monkeypatch.setattr(json_nesting, "MAX_JSON_NESTING", limit)
                assert nests_too_deeply(raw) == (levels > limit), raw


def test_string_that_is_no_json_or_no_text_is_refused() -> None:
    for text in ("{'a': 1}", '"\ud800"', ""):
        with pytest.raises(ValueError):
            read_json(text)


def test_names_are_counted_outside_of_strings() -> None:
    members = {str(number): number for number in range(9)}
    text = json.dumps({"a": ':":\\":' * 50_000, "b": [{"c:": 1}, {'"': {"\\": ":"}}], "d": members})
    for raw in (text.encode(), text.replace(": ", " \n:\t").encode()):
        assert has_more_names(raw, 14) and not has_more_names(raw, 15)
    assert not has_more_names(json.dumps(["a:b" * 100_000]).encode(), 0)


def test_a_body_of_too_many_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder would hold the interpreter's lock for a second and more."""
    monkeypatch.setattr("sglang.srt.entrypoints.http_body.MAX_NAMES", 100)
    body = {"value": {str(number): ": :" for number in range(99)}}
    assert parse_body(json.dumps(body).encode(), Anything).value["98"] == ": :"
    body["value"]["more"] = ""
    with pytest.raises(ApiError, match="more than 100 names; send less at once") as refused:
        parse_body(json.dumps(body).encode(), Anything)
    assert refused.value.status == 413
