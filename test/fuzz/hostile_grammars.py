"""Patterns, grammars and schemas that cost a careless compiler its memory, its time or its stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from fuzz.hostile_bodies import CHAT, GENERATE, Hostile, chat, generate
from fuzz.scale import GRAMMAR_STEP, PATTERN_STEP

PATTERNS = {
    "repeated 2^32 - 2 times": "a{4294967294}",
    "repeated 10^6 times": "a{1000000}",
    "repeated 10^20 times": "a{99999999999999999999}",
    "repeated 1,000 x 1,000 times": "(a{1000}){1000}",
    "repeated 100^4 times": "(((a{100}){100}){100}){100}",
    "at least 10^6 times": "a{1000000,}",
    "400 nested groups": "(" * 400 + "a" + ")" * 400,
    "50,000 nested groups": "(" * 50_000 + "a" + ")" * 50_000,
    "100,000 alternatives": "|".join(map(str, range(100_000))),
    "100,000 characters": "ab" * 50_000,
    "10,000 groups": "(a)" * 10_000,
    "a class of all characters 10 x 1,000 times": "[\\x00-\\U0010ffff]{1000}" * 10,
    "unclosed classes": "[" * 1_000,
    "nested quantifiers": "(a*)*" * 30,
    "backward references": "(a+)\\1" * 50,
    "nested look-ahead": "(?=" * 200 + "a" + ")" * 200,
    "a long look-behind": "(?<=a{1000000})b",
    "exponential search": "(x+x+)+y|(.*){1,30}[bc]",
}

EBNF = {
    "nothing but itself": "root ::= root",
    "two rules in a circle": "root ::= a\na ::= root",
    "recursion without an end": 'root ::= "a" root',
    "left recursion": 'root ::= root "a" | "b"',
    "no root": 'other ::= "a"',
    "an undefined rule": "root ::= nothing",
    "repeated 10^6 times": 'root ::= "a"{1000000}',
    "repeated 10^20 times": 'root ::= "a"{99999999999999999999}',
    "3,000 nested groups": "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000,
    "20,000 rules": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000)) + 'r20000 ::= "a"',
    "2^40 words": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"',
    "a class backwards": "root ::= [z-a]",
    "an empty class": "root ::= []",
    "an unclosed string": 'root ::= "a',
    "the empty word only": 'root ::= ""',
}

CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
SCHEMAS = {
    "a reference to itself": json.dumps({"$ref": "#"}),
    "a circle of references": json.dumps({"$ref": "#/$defs/a", "$defs": CIRCLE}),
    "anyOf of itself": json.dumps({"anyOf": [{"$ref": "#"}]}),
    "an endless object": json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "a remote reference": json.dumps({"$ref": "https://example.org/schema.json"}),
    "a file": json.dumps({"$ref": "file:///etc/passwd"}),
    "a missing definition": json.dumps({"$ref": "#/$defs/none"}),
    "an unknown type": json.dumps({"type": "nothing"}),
    "nothing": "false",
    "no value": json.dumps({"enum": []}),
    "contradicting bounds": json.dumps({"type": "integer", "minimum": 5, "maximum": 1}),
    "a length of 10^18": json.dumps({"type": "string", "minLength": 10**18}),
    "10^9 items": json.dumps({"type": "array", "items": {}, "minItems": 10**9}),
    "a pattern repeated 10^6 times": json.dumps({"type": "string", "pattern": "^a{1000000}$"}),
    "an integer of 400 digits": json.dumps({"type": "integer", "minimum": 10**400}),
    "half an object": "{",
    "a list": "[1, 2]",
    "100,000 values": json.dumps({"enum": [f"value {i}" for i in range(100_000)]}),
    "5,000 properties": json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}}),
    "allOf 200": json.dumps({"allOf": [{"properties": {f"p{i}": {"enum": [i]}}} for i in range(200)]}),
}

NESTINGS = {
    "object": ('{"type": "object", "properties": {"a": ', '}, "required": ["a"]}'),
    "array": ('{"type": "array", "minItems": 1, "items": ', "}"),
    "anyOf": ('{"anyOf": [{"type": "integer"}, ', "]}"),
}

UNSATISFIABLE = {
    *(f"ebnf: {name}" for name in ("nothing but itself", "two rules in a circle", "recursion without an end")),
    *(f"schema: {name}" for name in ("a reference to itself", "a circle of references", "anyOf of itself")),
    *(f"schema: {name}" for name in ("an endless object", "a remote reference", "a file", "a missing definition")),
}
"""No answer fulfils them, or nobody knows which would: they must be refused."""


def nested_schema(depth: int, kind: str) -> str:
    opening, closing = NESTINGS[kind]
    return opening * depth + '{"type": "string"}' + closing * depth  # json.dumps would recurse


def given(kind: str, name: str, field: str, text: str) -> Hostile:
    name = f"{kind}: {name}"
    body = generate(**{field: text})
    return (
        Hostile(name, GENERATE, lambda: body, (400,))
        if name in UNSATISFIABLE
        else Hostile(name, GENERATE, lambda: body)
    )


def patterns() -> Iterator[Hostile]:
    """In a short run every sixth of them for `stop_regex`, and others for `regex`."""
    for i, (name, pattern) in enumerate(PATTERNS.items()):
        if i % PATTERN_STEP == 0:
            yield given("stop_regex", name, "stop_regex", pattern)
        if i % PATTERN_STEP == PATTERN_STEP // 2:
            yield given("regex", name, "regex", pattern)
    many = generate(stop_regex=["(a|b)*" * 200] * 32)
    yield Hostile("32 stop_regex of 1,200 characters", GENERATE, lambda: many)


def grammars() -> Iterator[Hostile]:
    for name, text in islice(EBNF.items(), 0, None, GRAMMAR_STEP):
        yield given("ebnf", name, "ebnf", text)
    for name, text in islice(SCHEMAS.items(), 0, None, GRAMMAR_STEP):
        yield given("schema", name, "json_schema", text)
    for kind in NESTINGS:
        for depth in (100, 2_000):
            yield given("schema", f"{kind} nested {depth:,} deep", "json_schema", nested_schema(depth, kind))
    deep = generate(json_schema=nested_schema(2_000, "object"))
    yield Hostile("four schemas nested 2,000 deep", GENERATE, lambda: deep, copies=4)
    tag = {"type": "structural_tag", "triggers": [""]}
    tag["structures"] = [{"begin": "<a>", "schema": {"$ref": "#"}, "end": ""}]
    yield Hostile("a structural tag without an end", CHAT, lambda: chat(response_format=tag))
