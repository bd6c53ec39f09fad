"""Objects of which the rest is missing or wrong."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sglang.srt.utils.json_nesting import MAX_JSON_NESTING
from sglang.srt.utils.partial_json import longest_object

WHOLE = {"a": 'x\n"é😀', "b": [1, -2.5e3, {"c": None}, []], "d": {}, "e": True, "": "y"}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_beginning_of_an_object_is_a_part_of_it(indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(WHOLE, indent=indent, ensure_ascii=ascii_only)
    for end in range(len(text)):
        part = longest_object(text[:end])
        assert list(part) == list(WHOLE)[: len(part)]
        for key in list(part)[:-1]:
            assert part[key] == WHOLE[key]
    assert longest_object(text) == WHOLE


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"path": "a.py", "content": "x = \\"', {"path": "a.py", "content": 'x = "'}),
        ('{"path": "a.py", "content": "x\\', {"path": "a.py", "content": "x"}),
        ('{"path": "a.py", "content": "x\\u00', {"path": "a.py", "content": "x"}),
        ('{"a": "\\ud83d', {"a": "\ufffd"}),
        ('{"path": "a.py", "conte', {"path": "a.py"}),
        ('{"path": "a.py", "content":', {"path": "a.py"}),
        ('{"count": 12', {}),
        ('{"count": 12,', {"count": 12}),
        ('{"on": tru', {}),
        ('{"a": 1, }', {"a": 1}),
        ('{"a": 1} and more', {"a": 1}),
        ("{'a': 1}", {}),
        ('{"a": NaN}', {}),
        ('{"a": 1, "b": ' + "9" * 5000 + "}", {"a": 1}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ('{"a": "\\x"}', {"a": ""}),
        ("[1]", {}),
        ("", {}),
        ("text", {}),
    ],
)
def test_what_is_read(text: str, part: dict[str, Any]) -> None:
    assert longest_object(text) == part


def test_nesting_is_bounded() -> None:
    value: Any = longest_object('{"a":' * 100_000)
    depth = 0
    while value:
        value, depth = value["a"], depth + 1
    assert depth == MAX_JSON_NESTING - 1


def test_long_texts() -> None:
    assert len(longest_object('{"a": "' + '\\n"'[:2] * 1_000_000)["a"]) == 1_000_000
    assert len(longest_object('{"a": [' + "1," * 100_000)["a"]) == 100_000


def test_a_long_text_takes_a_few_times_its_own_memory() -> None:
    text = json.dumps({"a": "x = 1  # a line\n" * 20_000})[:-2]
    tracemalloc.start()
    try:
        longest_object(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 * len(text)
