"""Choices between schemas in which no value is valid under two: the same answer as pair by pair, in linear work."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.constrained import exclusive_schemas
from sglang.srt.constrained.exclusive_schemas import MAX_COMPARED, exclusive

Schema = dict[str, Any]
MANY = 1000
NULL: Schema = {"type": "null"}


def tagged(tag: str, name: str = "kind") -> Schema:
    return {"type": "object", "properties": {name: {"const": tag}, "x": {"type": "string"}}, "required": [name]}


LONG: dict[str, Callable[[], list[Schema]]] = {
    "constants": lambda: [{"const": f"v{i}"} for i in range(MANY)],
    "constants of every type": lambda: [{"const": 0, "type": "integer"}, *({"const": f"v{i}"} for i in range(MANY))],
    "a property": lambda: [tagged(f"v{i}") for i in range(MANY)],
    "types and a property": lambda: [NULL, *(tagged(f"v{i}") for i in range(MANY)), {"type": "string"}],
    "two properties": lambda: [tagged(f"v{i}", "kind" if i % 2 else "tag") for i in range(MANY)],
    "unknown types": lambda: [{"type": f"t{i}"} for i in range(MANY)],
    "no constants": lambda: [{"type": "object", "properties": {"x": {"type": "string"}}}] * MANY,
}


@pytest.mark.parametrize("name", LONG)
def test_long_choices_are_not_compared_pair_by_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def count(function: str) -> None:
        counted = getattr(exclusive_schemas, function)

        def call(*args: Any) -> Any:
            calls[function] += 1
            return counted(*args)

        monkeypatch.setattr(exclusive_schemas, function, call)

    count("_constants")
    count("_are_other_types")
    assert exclusive(LONG[name]()) == (name not in ("two properties", "unknown types", "no constants"))
    assert calls["_constants"] <= 4 * MANY and calls["_are_other_types"] <= MAX_COMPARED**2


def test_a_repeated_constant_is_seen_in_a_long_choice() -> None:
    assert not exclusive([*LONG["constants"](), {"const": "v7"}])
    assert not exclusive([*LONG["a property"](), tagged("v7")])


def test_short_choices_are_exclusive_if_all_pairs_are() -> None:
    rng, outcomes = random.Random(0), []
    for _ in range(3000):
        branches = [_random_branch(rng) for _ in range(rng.randint(2, 4))]
        pairs = all(exclusive(list(pair)) for pair in itertools.combinations(branches, 2))
        assert exclusive(branches) == pairs, branches
        outcomes.append(pairs)
    assert 300 < sum(outcomes) < 2700


def _random_branch(rng: random.Random) -> Schema:
    constants: list[Any] = rng.sample(["a", "b", "c", "d", "e", 1, 2], rng.randint(1, 2))
    return rng.choice(
        [
            {"type": rng.choice(["null", "string", "integer", "number", ["string", "null"]])},
            {"enum": constants},
            {"type": "string", "const": constants[0]},
            tagged(constants[0], rng.choice(["kind", "tag"])),
            {"properties": {"kind": {"enum": constants}, "tag": {"const": constants[-1]}}, "required": ["kind", "tag"]},
            {"properties": {"kind": {"const": constants[0]}}},
        ]
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer"}, {"type": "string"}, True),
        ({"const": 1}, {"const": True}, True),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": [1]}, {"enum": [[1.0], "a"]}, False),
        ({"const": "a"}, {"type": "string"}, False),
        (tagged("a"), tagged("b"), True),
        (tagged("a"), tagged("a"), False),
        (tagged("a", "kind"), tagged("b", "tag"), False),
        (tagged("a"), {"properties": {"kind": {"const": "b"}}}, False),
        (tagged("a"), True, False),
    ],
)
def test_pairs(first: Any, second: Any, expected: bool) -> None:
    assert exclusive([first, second]) is expected


def test_what_is_no_choice() -> None:
    assert not exclusive({"const": 1})
    assert exclusive([]) and exclusive([{}])
    assert MAX_COMPARED < MANY
