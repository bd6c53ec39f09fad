"""Structural tags as llguidance grammars: one in Lark, which names others for the schemas and grammars in tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Format = dict[str, Any]
Subgrammar = dict[str, Any]

_ANY_TEXT = "/(?s:.*)/"
_OTHER_LIBRARY = "llguidance cannot express; start the server with --grammar-backend xgrammar, or leave it out"


class _Optional(NamedTuple):
    """A part that may be left out. Free text after it must not begin like it: the library's lexer takes the longest
    match, and would read the part as that text."""

    rule: str
    begin: str
    """A Lark expression of the text that the part begins with."""


class TagWriter:
    """Collects rules while it walks through a tag. `schema` makes a subgrammar of a JSON schema (its second argument:
    ignore keywords that cannot be enforced), and `lark` one of a grammar in any syntax."""

    def __init__(self, schema: Callable[[Any, bool], Subgrammar], lark: Callable[[str], Subgrammar]) -> None:
        self._schema, self._lark = schema, lark
        self.rules: list[str] = []
        self.subgrammars: list[Subgrammar] = []

    def start(self, form: Any) -> None:
        """Writes the rule `start`. Raises ValueError, which names the part, if a part is not supported."""
        body = self._part(form, last=True, in_call=False)
        self.rules.insert(0, f"start: {body}")

    def _part(self, form: Any, last: bool, in_call: bool, behind: _Optional | None = None) -> str:
        """Returns a part as a Lark expression. last: nothing follows it, so free text needs no end. in_call: it belongs
        to one of several alternative tags, as function calls do. behind: an optional part that comes before it."""
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise ValueError(f"expected an object with a type, got {json.dumps(form):.100}")
        kind = form["type"]
        if kind not in _WRITERS:
            raise ValueError(f"{kind!r} is a part that {_OTHER_LIBRARY}")
        keys, write = _WRITERS[kind]
        for key, value in form.items():
            if key not in keys and key != "type" and value not in (None, [], False):
                raise ValueError(f"{key!r} of {kind!r} is what {_OTHER_LIBRARY}")
        try:
            if behind is not None and kind in _FREE:
                return _FREE[kind](self, form, last, in_call, behind)
            return f"{_maybe(behind)}{write(self, form, last, in_call)}"
        except KeyError as error:
            raise ValueError(f"{kind!r} is missing its key {error}") from None

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _subgrammar(self, grammar: Subgrammar) -> str:
        name = f"g{len(self.subgrammars)}"
        self.subgrammars.append({**grammar, "name": name})
        return f"@{name}"

    def _terminal(self, body: str) -> str:
        name = f"E{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _text_besides(self, text: str, begin: str) -> str:
        """Returns the terminal `text` without texts that begin with `begin`."""
        return self._terminal(f"{text} & ~({begin} /(?s:.*)/)")

    def _text(self, form: Format, last: bool, in_call: bool, behind: _Optional | None = None) -> str:
        if not last:
            raise ValueError(f"text of any kind before another part, without a tag around it, is what {_OTHER_LIBRARY}")
        return self._one_terminal(_ANY_TEXT, behind)

    def _one_terminal(self, text: str, behind: _Optional | None) -> str:
        if behind is None:
            return text
        return f"({behind.rule} {text} | {self._text_besides(text, behind.begin)})"

    def _constant(self, form: Format, last: bool, in_call: bool) -> str:
        return _literal(form["value"])

    def _json(self, form: Format, last: bool, in_call: bool) -> str:
        style = form.get("style", "json")
        if style != "json":
            raise ValueError(f"arguments in the style {style!r} are what {_OTHER_LIBRARY}")
        return self._subgrammar(self._schema(form["json_schema"], in_call))

    def _regex(self, form: Format, last: bool, in_call: bool, behind: _Optional | None = None) -> str:
        return self._one_terminal(regex_literal(form["pattern"]), behind)

    def _grammar(self, form: Format, last: bool, in_call: bool) -> str:
        return self._subgrammar(self._lark(form["grammar"]))

    def _sequence(self, form: Format, last: bool, in_call: bool) -> str:
        elements, written = _parts(form, "elements"), []
        behind: _Optional | None = None
        for part in elements[:-1]:
            if (begin := _begin_of_optional(part)) is None:
                written.append(self._part(part, False, in_call, behind))
                behind = None
                continue
            written.append(_maybe(behind))
            behind = _Optional(self._rule(self._part(part, False, in_call).removesuffix("?")), _literal(begin))
        return " ".join([*filter(None, written), self._part(elements[-1], last, in_call, behind)])

    def _or(self, form: Format, last: bool, in_call: bool, behind: _Optional | None = None) -> str:
        parts = _parts(form, "elements")
        if any(map(_begins_as_an_object, parts)) and any(map(_is_grammar, parts)):
            raise ValueError(f"calls that begin like an answer in JSON beside one are what {_OTHER_LIBRARY}")
        return _alternatives([self._part(part, last, in_call, behind) for part in parts])

    def _optional(self, form: Format, last: bool, in_call: bool) -> str:
        return f"({self._part(form['content'], last, in_call)})?"

    def _star(self, form: Format, last: bool, in_call: bool) -> str:
        return f"({self._part(form['content'], False, in_call)})*"

    def _plus(self, form: Format, last: bool, in_call: bool) -> str:
        return f"({self._part(form['content'], False, in_call)})+"

    def _tag(self, form: Format, last: bool, in_call: bool, after: str = "") -> str:
        """Writes a tag. after: the leading part of `begin` that has been read already."""
        begin, ends, content = form["begin"], form["end"], form["content"]
        ends = ends if isinstance(ends, list) else [ends]
        if not (isinstance(begin, str) and ends and all(isinstance(end, str) for end in ends)):
            raise ValueError(f"tags that begin or end with a token are what {_OTHER_LIBRARY}")
        opening = _literal(begin.removeprefix(after))
        closing = _alternatives([_literal(end) for end in ends])
        is_text = isinstance(content, dict) and content.get("type") == "any_text"
        if is_text and all(ends):
            self._part(content, True, in_call)  # checks the content's keys
            return f"{opening} {self._rule(_ANY_TEXT, f'[suffix={self._terminal(closing)}]')}"
        return f"{opening} {self._part(content, last and not any(ends), in_call)} {closing}"

    def _triggered(self, form: Format, last: bool, in_call: bool, behind: _Optional | None = None) -> str:
        """Writes tags in free text. Text before a trigger is matched as short as possible, so that it cannot contain a
        trigger."""
        tags, triggers = _parts(form, "tags"), _parts(form, "triggers")
        once, needed = form.get("stop_after_first", False), form.get("at_least_one", False)
        if not (last or (needed and once)):
            raise ValueError(f"'triggered_tags' before another part are what {_OTHER_LIBRARY}")
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            matching = [trigger for trigger in triggers if isinstance(tag, dict) and _begins(tag, trigger)]
            if len(matching) != 1 or not matching[0]:
                raise ValueError("every tag of 'triggered_tags' must begin with exactly one of the triggers")
            bodies[matching[0]].append(self._tag(tag, last=False, in_call=True, after=matching[0]))
        rest = {trigger: _alternatives(body) for trigger, body in bodies.items() if body}
        later = self._tag_in_text(_ANY_TEXT, rest)
        if needed:
            first = _alternatives([f"{_literal(trigger)} {body}" for trigger, body in rest.items()])
            return f"{_maybe(behind)}{first if once else f'{first} {later}* {_ANY_TEXT}'}"
        more = "" if once else f" {later}* {_ANY_TEXT}"
        whole = f"({later} | {_ANY_TEXT})" if once else f"{later}* {_ANY_TEXT}"
        if behind is None:
            return whole
        text = self._text_besides(_ANY_TEXT, behind.begin)
        return f"({behind.rule} {whole} | {self._tag_in_text(text, rest)}{more} | {text})"

    def _tag_in_text(self, text: str, rest: Mapping[str, str]) -> str:
        """Returns a rule of text, a trigger and the rest of one of its tags. rest: the tags' rests by trigger."""
        tags = [f"{self._rule(text, f'[suffix={_literal(trigger)}]')} {body}" for trigger, body in rest.items()]
        return self._rule(_alternatives(tags))

    def _row(self, form: Format, last: bool, in_call: bool) -> str:
        tag = self._rule(_alternatives([self._tag(tag, False, True) for tag in _parts(form, "tags")]))
        row = tag if form.get("stop_after_first", False) else f"{tag} ({_literal(form['separator'])} {tag})*"
        return row if form.get("at_least_one", False) else f"({row})?"


_Writer = Callable[[TagWriter, Format, bool, bool], str]
_WRITERS: Mapping[str, tuple[frozenset[str], _Writer]] = {
    "any_text": (frozenset(), TagWriter._text),
    "const_string": (frozenset(("value",)), TagWriter._constant),
    "grammar": (frozenset(("grammar",)), TagWriter._grammar),
    "json_schema": (frozenset(("json_schema", "style", "max_whitespace_cnt")), TagWriter._json),
    "optional": (frozenset(("content",)), TagWriter._optional),
    "or": (frozenset(("elements",)), TagWriter._or),
    "plus": (frozenset(("content",)), TagWriter._plus),
    "regex": (frozenset(("pattern",)), TagWriter._regex),
    "sequence": (frozenset(("elements",)), TagWriter._sequence),
    "star": (frozenset(("content",)), TagWriter._star),
    "tag": (frozenset(("begin", "content", "end")), TagWriter._tag),
    "tags_with_separator": (
        frozenset(("tags", "separator", "at_least_one", "stop_after_first")),
        TagWriter._row,
    ),
    "triggered_tags": (
        frozenset(("tags", "triggers", "at_least_one", "stop_after_first")),
        TagWriter._triggered,
    ),
}
"""The keys of every type of part, and the function that writes it. Keys that are left out here change what is
allowed."""
_FREE = {
    "any_text": TagWriter._text,
    "or": TagWriter._or,
    "regex": TagWriter._regex,
    "triggered_tags": TagWriter._triggered,
}
"""Parts that may begin with arbitrary text."""


def regex_literal(pattern: Any) -> str:
    """Returns a regular expression in Lark whose classes (\\d, \\w, \\s) match ASCII only, as in JSON schemas."""
    if not isinstance(pattern, str):
        raise ValueError("a regular expression must be a string")
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dws')}/" if pattern else '""'


def _literal(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {json.dumps(text):.100}")
    return json.dumps(text)


def _maybe(part: _Optional | None) -> str:
    return f"{part.rule}? " if part is not None else ""


def _begin_of_optional(form: Any) -> str | None:
    """Returns the text at the beginning of an optional part that begins with a tag; None for other parts."""
    if not isinstance(form, dict) or form.get("type") != "optional":
        return None
    part = form.get("content")
    while isinstance(part, dict) and part.get("type") == "sequence" and part.get("elements"):
        part = part["elements"][0] if isinstance(part["elements"], list) else None
    begin = part.get("begin") if isinstance(part, dict) and part.get("type") == "tag" else None
    return begin if isinstance(begin, str) and begin else None


def _begins_as_an_object(form: Any) -> bool:
    """Returns whether a row of tags begins with more of a JSON object than its brace: the library's lexer takes the
    longest match, and would leave no other object."""
    tags = form.get("tags") if isinstance(form, dict) else None
    return isinstance(tags, list) and any(isinstance(tag, dict) and _begins(tag, "{") for tag in tags)


def _is_grammar(form: Any) -> bool:
    return isinstance(form, dict) and form.get("type") in ("json_schema", "grammar")


def _alternatives(bodies: list[str]) -> str:
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"


def _parts(form: Format, key: str) -> list[Any]:
    parts = form[key]
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{key!r} of {form['type']!r} must be a list that is not empty")
    return parts


def _begins(tag: Format, trigger: Any) -> bool:
    begin = tag.get("begin")
    return isinstance(begin, str) and isinstance(trigger, str) and begin.startswith(trigger)
