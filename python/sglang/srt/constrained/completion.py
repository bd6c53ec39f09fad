"""Check that every rule of a grammar can end.

`root ::= root`, `root ::= "a" root` and schemas that require themselves are grammars that no finite text satisfies:
they would fail in the middle of an answer, or run until the length limit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

_PRINTED_RULE = re.compile(r"^([A-Za-z_][\w.-]*) ::= ", re.MULTILINE)
_PRINTED_TOKEN = re.compile(
    r"""
      (?P<text> "(?:[^"\\]|\\.)*" | \[(?:[^\]\\]|\\.)*\]\*? )
    | (?P<name> [A-Za-z_][\w.-]* )
    | \{\s*(?P<least> \d+ )[^}]*\}
    | (?P<aside> \(= | (?<=[\w.-])\( )
    | (?P<mark> [()|*?] )
    """,
    re.VERBOSE | re.DOTALL,
)

_LARK_RULE = re.compile(
    r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\{[^}\n]*\})?(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*:", re.MULTILINE
)
_LARK_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | \#[^\n]* )
    | (?P<text> "(?:[^"\\]|\\.)*" | /(?:[^/\\\n]|\\.)*/ | <[^>\n]*> )
    | (?P<name> [A-Za-z_][\w-]* )
    | [{~]\s*(?P<least> \d+ )[^}\s]*\}?
    | (?P<aside> [\[{] )
    | (?P<mark> [()\]|*?}] )
    """,
    re.VERBOSE | re.DOTALL,
)

_Item: TypeAlias = "str | Group | None"
"""A rule's name, a group, or None for text, which always ends."""


@dataclass(slots=True)
class Group:
    """A choice between sequences of items. It can end if all items of one alternative can."""

    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])
    names: set[str] = field(default_factory=set)
    """All rule names in a rule's body; empty for groups inside of it."""

    def ends(self, complete: set[str], rules: Mapping[str, Group]) -> bool:
        """Returns whether the group can end if the rules in `complete` can. Names without a rule can."""
        return any(
            all(
                item is None
                or (item.ends(complete, rules) if isinstance(item, Group) else item in complete or item not in rules)
                for item in alternative
            )
            for alternative in self.alternatives
        )


def unfinishable_rule(rules: Mapping[str, Group], start: str) -> str | None:
    """Returns the name of a rule that `start` reaches and that no text satisfies, or None. Names without a rule count
    as able to end."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for name, body in rules.items():
        for mentioned in body.names:
            users[mentioned].add(name)
    complete: set[str] = set()
    to_check = set(rules)
    while to_check:
        name = to_check.pop()
        if name not in complete and rules[name].ends(complete, rules):
            complete.add(name)
            to_check |= users[name] - complete
    reached: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in rules and name not in reached:
            if name not in complete:
                return name
            reached.add(name)
            pending.extend(rules[name].names)
    return None


def printed_rules(text: str) -> dict[str, Group]:
    """Parses rules `name ::= body` as xgrammar prints them. Text that it does not know, such as `TagDispatch(...)`,
    counts as able to end; the rules named there count as reached."""
    return _rules(text, _PRINTED_RULE, _PRINTED_TOKEN)


def lark_rules(text: str) -> dict[str, Group]:
    """Parses the rules of a Lark grammar. Text that it does not know counts as able to end."""
    return _rules(text, _LARK_RULE, _LARK_TOKEN)


def _rules(text: str, rule: re.Pattern[str], token: re.Pattern[str]) -> dict[str, Group]:
    starts = list(rule.finditer(text))
    ends = [following.start() for following in starts[1:]] + [len(text)]
    return {start[1]: _parse(text[start.end() : end], token) for start, end in zip(starts, ends, strict=True)}


def _parse(body: str, pattern: re.Pattern[str]) -> Group:
    """Parses a rule's body, with an explicit stack because clients choose the nesting."""
    whole = Group()
    stack = [whole]
    for token in pattern.finditer(body):
        mark, sequence = token["mark"], stack[-1].alternatives[-1]
        if token["name"]:
            whole.names.add(token["name"])
        if token["aside"]:  # the content of a look-ahead, an option or a macro's arguments need not end
            sequence.append(None)
            stack.append(Group())
        elif mark == "(":
            group = Group()
            sequence.append(group)
            stack.append(group)
        elif mark in (")", "]", "}"):
            if len(stack) > 1:
                stack.pop()
        elif mark == "|":
            stack[-1].alternatives.append([])
        elif mark in ("*", "?") or (token["least"] and int(token["least"]) == 0):
            if sequence:
                sequence.pop()  # may be left out
        elif token["name"] or token["text"]:
            sequence.append(token["name"])
    return whole


def schema_rules(schema: Any, start: str) -> dict[str, Group]:
    """Returns a JSON schema as rules, one for each of its parts; `start` is the whole. A part needs what it requires:
    properties, items, references. References without a target count as able to end."""
    names = {id(schema): start}
    rules: dict[str, Group] = {}
    pending = [schema]
    while pending:
        part = pending.pop()
        name = names[id(part)]
        if not isinstance(part, dict) or name in rules:
            continue

        def item(entry: Any, place: str, name: str = name) -> str:
            if id(entry) not in names:
                names[id(entry)] = f"{name}/{place}"
                pending.append(entry)
            return names[id(entry)]

        required: list[_Item] = []
        if isinstance(part.get("$ref"), str):
            target = _resolve(schema, part["$ref"])
            if target is not None:
                required.append(item(target, "$ref"))
        required += [item(entry, f"allOf/{i}") for i, entry in enumerate(_list(part, "allOf"))]
        for choice in ("anyOf", "oneOf"):
            branches = [item(entry, f"{choice}/{i}") for i, entry in enumerate(_list(part, choice))]
            if branches:
                required.append(Group([[branch] for branch in branches]))
        if part.get("type") in ("object", ["object"]) and isinstance(part.get("properties"), dict):
            wanted = [key for key in _list(part, "required") if isinstance(key, str) and key in part["properties"]]
            required += [item(part["properties"][key], f"properties/{key}") for key in wanted]
        if (
            part.get("type") in ("array", ["array"])
            and isinstance(minimum := part.get("minItems"), int)
            and minimum > 0
        ):
            first = _list(part, "prefixItems")
            required += [item(entry, f"prefixItems/{i}") for i, entry in enumerate(first[:minimum])]
            if minimum > len(first) and "items" in part:
                required.append(item(part["items"], "items"))
        rules[name] = Group([required], _names(required))
    return rules


def _names(items: list[_Item]) -> set[str]:
    groups = [entry for item in items if isinstance(item, Group) for entry in item.alternatives]
    return {item for entries in [items, *groups] for item in entries if isinstance(item, str)}


def _list(part: dict[str, Any], name: str) -> list[Any]:
    return part[name] if isinstance(part.get(name), list) else []


def _resolve(schema: Any, reference: str) -> Any:
    """Returns the part that a reference within the schema names; None if there is none."""
    for key in reference.removeprefix("#").split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return None
    return schema
