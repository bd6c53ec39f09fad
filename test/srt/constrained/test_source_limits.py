from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sglang.srt.constrained.grammar import ANY_JSON, GrammarError, GrammarKey
from sglang.srt.constrained.source_limits import check_source
from sglang.srt.constrained.structural_tags import as_format
from sglang.srt.sampling.grammar_names import tag_of_format
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from sglang.srt.sampling.sampling_params import SamplingParams


def check(kind: Any, source: Any) -> None:
    check_source(GrammarKey(kind, source if isinstance(source, str) else json.dumps(source)))


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", nested(2000), "nests 2001 objects and arrays, at most 128"),
        ("json_schema", "[" * 100_000, "nests 100000 objects"),
        ("json_schema", '{"type"', "invalid json_schema: it is not JSON"),
        ("json_schema", {"maxLength": 10_001}, "maxLength must be at most 10000, got 10001; leave it out"),
        ("json_schema", '{"minItems": 1' + "0" * 400 + "}", "minItems must be at most 10000, got 1e\\+18"),
        ("json_schema", '{"maxItems": 1e999}', "maxItems must be at most 10000"),
        ("json_schema", {"enum": list(range(4097))}, "An enum must have at most 4096 values, got 4097"),
        ("json_schema", {"const": [0] * 20_000}, "json_schema has more than 20000 values"),
        (
            "json_schema",
            {"$ref": "http://127.0.0.1/a.json"},
            r'\$ref of "http://127.0.0.1/a.json": only references inside',
        ),
        ("json_schema", {"items": [{"$ref": "file:///etc/passwd"}]}, "only references inside of the schema"),
        ("json_schema", {"properties": {"default": {"$ref": "other.json#/a"}}}, "only references inside of the schema"),
        ("json_schema", {"$dynamicRef": "#anchor"}, "only references inside of the schema"),
        ("json_schema", {"pattern": "a{10001}"}, "count in braces must be at most 10000, got 10001"),
        ("json_schema", {"patternProperties": {"(" * 129: {}}}, "may nest 128 groups, got 129"),
        ("regex", "a{99999999999999999999}", "count in braces must be at most 10000, got 1e"),
        ("regex", "a{2,20000}", "got 20000"),
        ("regex", "(" * 129 + "a" + ")" * 129, "may nest 128 groups, got 129"),
        ("ebnf", "root ::= " + "(" * 200 + '"a"' + ")" * 200, "may nest 128 groups, got 200"),
        ("ebnf", 'root ::= "a"{ 3 , 100000 }', "got 100000"),
        ("structural_tag", {"content": {"json_schema": {"$ref": "http://a"}}}, "only references inside"),
        ("structural_tag", {"content": {"type": "regex", "pattern": "a{10001}"}}, "got 10001"),
        ("structural_tag", {"content": {"type": "grammar", "grammar": 'root ::= "a"{10001}'}}, "got 10001"),
    ],
)
def test_what_is_too_much(kind: str, source: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", ANY_JSON),
        ("json_schema", nested(127)),
        ("json_schema", {"type": "string", "maxLength": 10_000, "pattern": r"\{20000}[{20000}]"}),
        ("json_schema", {"$defs": {"a": {"$ref": "#"}}, "$ref": "#/$defs/a", "$schema": "http://json-schema.org/"}),
        ("json_schema", {"enum": [{"$ref": "http://a"}], "properties": {"maxLength": {"type": "integer"}}}),
        ("json_schema", {"properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}}}),
        ("json_schema", "true"),
        ("regex", r"\(" * 200),
        ("ebnf", 'root ::= "' + "(" * 200 + '{20000}" # ((( {20000}'),
    ],
)
def test_what_is_not(kind: str, source: Any) -> None:
    check(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[" * MAX_GRAMMAR_LENGTH),
        ("ebnf", 'root ::= "a"{1,' + " " * MAX_GRAMMAR_LENGTH),
        ("ebnf", 'root ::= "' + '\\"' * (MAX_GRAMMAR_LENGTH // 2)),
    ],
)
def test_quotes_and_counts_without_an_end_are_checked_in_one_pass(kind: str, source: str) -> None:
    """Each took minutes when the search began again at every character."""
    check(kind, source)


@pytest.mark.parametrize("wanted", ["json_schema", "tools", "structural_tag"])
def test_a_tag_is_named_as_what_it_was_made_of(wanted: str) -> None:
    many = {"type": "json_schema", "json_schema": {"enum": [[0] * 4000] * 6}}
    source = msgspec.json.encode(tag_of_format(wanted, many)).decode()
    with pytest.raises(GrammarError, match=f"^{wanted} has more than"):
        check_source(GrammarKey("structural_tag", source))
    params = SamplingParams(structural_tag=source + " " * MAX_GRAMMAR_LENGTH)
    with pytest.raises(ValueError, match=f"^{wanted} must have at most"):
        params.verify(1000)
    assert as_format(source) == {"type": "structural_tag", "format": many}
