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

from sglang.srt.constrained.schema_places import ROOT, Place

# A quote without an end reaches to the end of the text: if it did not match, the search would begin again at each quote
# in it. Quotes are written as runs between escapes: the library keeps memory for each repetition of a group.
_PRINTED_RULE = re.compile(r"^([A-Za-z_][\w.-]*) ::= ", re.MULTILINE)
_PRINTED_TOKEN = re.compile(
    r"""
      (?P<text> "[^"\\]*(?:\\.[^"\\]*)*"? | \[[^\]\\]*(?:\\.[^\]\\]*)*\]?\*? )
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
    | (?P<text> "[^"\\]*(?:\\.[^"\\]*)*"? | /[^/\\\n]*(?:\\.[^/\\\n]*)*/? | <[^>\n]*>? )
    | (?P<name> [A-Za-z_][\w-]* )
    | [{~]\s*(?P<least> \d+ )[^}\s]*\}?
    | (?P<aside> [\[{] )
    | (?P<mark> [()\]|*?}] )
    """,
    re.VERBOSE | re.DOTALL,
)

Name: TypeAlias = "str | Place"
"""Of a rule; the rules of a schema are named by its places."""
_Item: TypeAlias = "str | Place | Group | None"
"""A rule's name, a group, or None for text, which always ends."""


@dataclass(slots=True)
class Group:
    """A choice between sequences of items. It can end if all items of one alternative can."""

    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])
    names: set[Name] = field(default_factory=set)
    """All rule names in a rule's body; empty for groups inside of it."""


@dataclass(slots=True, eq=False)
class _Choice:
    """A group whose end is looked for. `user`: the rule whose body it is, or the sequence that it is an item of."""

    user: Name | _Sequence
    can_end: bool = False


@dataclass(slots=True, eq=False)
class _Sequence:
    """An alternative of a choice, and how many of its items are not known to end."""

    choice: _Choice
    missing: int


def unfinishable_rule(rules: Mapping[Name, Group], start: Name) -> str | None:
    """Returns the name of a rule that `start` reaches and that no text satisfies, or None. Names without a rule count
    as able to end."""
    complete = _complete(rules)
    reached: set[Name] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in rules and name not in reached:
            if name not in complete:
                return str(name)
            reached.add(name)
            pending.extend(rules[name].names)
    return None


def _complete(rules: Mapping[Name, Group]) -> set[Name]:
    """Returns the rules that can end. Each item is counted once when it is found to end, so the work is proportional to
    the rules' length; and nothing recurses, because clients choose the nesting."""
    users: defaultdict[Name, list[_Sequence]] = defaultdict(list)
    groups = [(body, _Choice(name)) for name, body in rules.items()]
    ready: list[_Sequence] = []
    for body, choice in groups:  # the list grows during the loop
        for alternative in body.alternatives:
            needed = [item for item in alternative if isinstance(item, Group) or item in rules]
            sequence = _Sequence(choice, len(needed))
            for item in needed:
                if isinstance(item, Group):
                    groups.append((item, _Choice(sequence)))
                elif item is not None:
                    users[item].append(sequence)
            if not needed:
                ready.append(sequence)
    complete: set[Name] = set()
    while ready:
        choice = ready.pop().choice
        if choice.can_end:
            continue
        choice.can_end = True
        if isinstance(choice.user, _Sequence):
            waiting = [choice.user]
        else:
            complete.add(choice.user)
            waiting = users[choice.user]
        for sequence in waiting:
            sequence.missing -= 1
            if not sequence.missing:
                ready.append(sequence)
    return complete


def printed_rules(text: str) -> dict[Name, Group]:
    """Parses rules `name ::= body` as xgrammar prints them. Text that it does not know, such as `TagDispatch(...)`,
    counts as able to end; the rules named there count as reached."""
    return _rules(text, _PRINTED_RULE, _PRINTED_TOKEN)


def lark_rules(text: str) -> dict[Name, Group]:
    """Parses the rules of a Lark grammar. Text that it does not know counts as able to end."""
    return _rules(text, _LARK_RULE, _LARK_TOKEN)


def _rules(text: str, rule: re.Pattern[str], token: re.Pattern[str]) -> dict[Name, Group]:
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


def schema_rules(schema: Any) -> dict[Name, Group]:
    """Returns a JSON schema as rules, one for each of its parts, named by their places; `ROOT` is the whole. A part
    needs what it requires: properties, items, references. References without a target count as able to end."""
    names = {id(schema): ROOT}
    rules: dict[Name, Group] = {}
    pending = [schema]
    while pending:
        part = pending.pop()
        name = names[id(part)]
        if not isinstance(part, dict) or name in rules:
            continue

        def item(entry: Any, keyword: str, which: str | int | None = None, name: Place = name) -> Place:
            if id(entry) not in names:
                place = name / keyword
                names[id(entry)] = place if which is None else place / which
                pending.append(entry)
            return names[id(entry)]

        required: list[_Item] = []
        if isinstance(part.get("$ref"), str):
            target = _resolve(schema, part["$ref"])
            if target is not None:
                required.append(item(target, "$ref"))
        required += [item(entry, "allOf", i) for i, entry in enumerate(_list(part, "allOf"))]
        for choice in ("anyOf", "oneOf"):
            branches = [item(entry, choice, i) for i, entry in enumerate(_list(part, choice))]
            if branches:
                required.append(Group([[branch] for branch in branches]))
        if part.get("type") in ("object", ["object"]) and isinstance(part.get("properties"), dict):
            wanted = [key for key in _list(part, "required") if isinstance(key, str) and key in part["properties"]]
            required += [item(part["properties"][key], "properties", key) for key in wanted]
        if (
            part.get("type") in ("array", ["array"])
            and isinstance(minimum := part.get("minItems"), int)
            and minimum > 0
        ):
            first = _list(part, "prefixItems")
            required += [item(entry, "prefixItems", i) for i, entry in enumerate(first[:minimum])]
            if minimum > len(first) and "items" in part:
                required.append(item(part["items"], "items"))
        rules[name] = Group([required], _names(required))
    return rules


def _names(items: list[_Item]) -> set[Name]:
    groups = [entry for item in items if isinstance(item, Group) for entry in item.alternatives]
    return {item for entries in [items, *groups] for item in entries if isinstance(item, str | Place)}


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
