"""Whether every rule of a grammar can come to an end.

`root ::= root`, `root ::= "a" root` and schemas that require themselves are grammars that no finite text satisfies:
they would fail in the middle of an answer, or run until the length limit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

_RULE = re.compile(r"^([A-Za-z_][\w.-]*) ::= ", re.MULTILINE)
_TOKEN = re.compile(
    r"""
      (?P<text> "(?:[^"\\]|\\.)*" | \[(?:[^\]\\]|\\.)*\]\*? )
    | (?P<name> [A-Za-z_][\w.-]* )(?P<call> \( )?
    | \{\s*(?P<least> \d+ )[^}]*\}
    | (?P<mark> \(= | [()|*?] )
    """,
    re.VERBOSE | re.DOTALL,
)

_Item: TypeAlias = "str | _Group | None"
"""A rule's name, a group, or None for text, which always ends."""


@dataclass(slots=True)
class _Group:
    """Ends if all items of one of its alternatives do."""

    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])

    def ends(self, complete: set[str], rules: dict[str, _Group]) -> bool:
        return any(
            all(
                item is None
                or (item.ends(complete, rules) if isinstance(item, _Group) else item in complete or item not in rules)
                for item in alternative
            )
            for alternative in self.alternatives
        )


def unfinishable_rule(text: str) -> str | None:
    """Name of a rule that `root` reaches and that no text satisfies, or None.

    text: rules `name ::= body` as xgrammar prints its grammars. What this does not understand, such as
    `TagDispatch(...)`, counts as able to end; the rules that it names are reached.
    """
    rules: dict[str, _Group] = {}
    mentions: dict[str, set[str]] = {}
    users: defaultdict[str, set[str]] = defaultdict(set)
    starts = list(_RULE.finditer(text))
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        name = start[1]
        rules[name], mentions[name] = _parse(text[start.end() : following.start() if following else len(text)])
        for mentioned in mentions[name]:
            users[mentioned].add(name)
    complete: set[str] = set()
    to_check = set(rules)
    while to_check:
        name = to_check.pop()
        if name not in complete and rules[name].ends(complete, rules):
            complete.add(name)
            to_check |= users[name] - complete
    reached: set[str] = set()
    pending = ["root"]
    while pending:
        name = pending.pop()
        if name in rules and name not in reached:
            if name not in complete:
                return name
            reached.add(name)
            pending.extend(mentions[name])
    return None


def _parse(body: str) -> tuple[_Group, set[str]]:
    """A rule's body, and the names in it. An explicit stack, because clients choose the nesting."""
    stack = [_Group()]
    names: set[str] = set()
    for token in _TOKEN.finditer(body):
        mark, sequence = token["mark"], stack[-1].alternatives[-1]
        if token["name"]:
            names.add(token["name"])
        if mark == "(=" or token["call"]:  # a look-ahead or a call: what is in there does not have to end
            sequence.append(None)
            stack.append(_Group())
        elif mark == "(":
            group = _Group()
            sequence.append(group)
            stack.append(group)
        elif mark == ")":
            if len(stack) > 1:
                stack.pop()
        elif mark == "|":
            stack[-1].alternatives.append([])
        elif mark in ("*", "?") or (token["least"] and int(token["least"]) == 0):
            if sequence:
                sequence.pop()  # may be left out
        elif token["name"] or token["text"]:
            sequence.append(token["name"])
    return stack[0], names
