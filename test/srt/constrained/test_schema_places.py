"""Places in schemas: written in messages, and small however long the names around them are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.constrained.schema_form import check_form
from sglang.srt.constrained.schema_keywords import check_keywords, for_llguidance
from sglang.srt.constrained.schema_places import MAX_NAME, ROOT

LONG_NAME = "n" * 100_000
NUM_PARTS = 500


@pytest.mark.parametrize("walk", [check_form, check_keywords, lambda schema: for_llguidance(schema, ())])
def test_parts_below_a_long_name_do_not_copy_it(walk: Callable[[Any], Any]) -> None:
    parts: dict[str, Any] = {f"a{i}": {} for i in range(NUM_PARTS)}
    schema = {"type": "object", "properties": {LONG_NAME: {"type": "object", "properties": parts}}}
    tracemalloc.start()
    try:
        walk(schema)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < NUM_PARTS * len(LONG_NAME) // 20


def test_messages_show_the_beginning_of_a_long_name() -> None:
    with pytest.raises(ValueError, match=f'^"enum" at #/properties/n{{{MAX_NAME}}}/anyOf/1 must be a list$'):
        check_form({"properties": {LONG_NAME: {"anyOf": [{}, {"enum": 3}]}}})


def test_a_place_is_written_as_a_path() -> None:
    assert str(ROOT) == "#" and str(ROOT / "items" / "anyOf" / 2) == "#/items/anyOf/2"
