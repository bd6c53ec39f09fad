"""Rewrites parts of JSON schemas that a grammar library would refuse as a choice between plain schemas, which it
accepts.

`{"type": "integer", "not": {"const": 3}}` becomes an integer below 3 or one above. Every value that the new schema
allows is valid under the old one. The converse holds except for objects: these get only the named properties, if a
choice depends on a missing one. Parts without such a form stay as they were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from sglang.srt.constrained import schema_complements
from sglang.srt.constrained.exclusive_schemas import exclusive
from sglang.srt.constrained.plain_schemas import (
    ATOMS,
    BOUNDS,
    COMBINED,
    Schema,
    Unwritable,
    atom_of,
    atoms,
    identity,
    kinds_of,
    simplified,
)
from sglang.srt.constrained.schema_emission import emitted, with_named_patterns, without_absent
from sglang.srt.constrained.schema_keywords import ANNOTATIONS, InexpressibleSchema, with_parts
from sglang.srt.constrained.schema_places import Place

MAX_ALTERNATIVES = 64
MAX_WORK = 4_000
"""Schemas that are read or joined for one schema of a client."""
MAX_DEPTH = 40
MAX_LISTS = 512
"""Most lists without repetition that are written out."""
MAX_POSITIONS = 8
"""Most positions considered for an item that a list must contain."""

_DEFINITIONS = ("$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")
_ELSEWHERE = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef")


_NO_SCHEMA = (TypeError, AttributeError, KeyError, OverflowError)
"""Errors from values that no schema has. The library reports what is wrong with them."""


class TooMuch(Unwritable):
    """Raised when the schema would become a choice with too many alternatives."""


def rewritten(schema: Any, needs: Callable[[Schema], bool]) -> Any:
    """Returns a copy in which the parts selected by `needs` are plain, where possible. The caller has limited the
    nesting and size of `schema`. A part that no value satisfies becomes false and is removed from choices; raises
    InexpressibleSchema if the whole schema becomes false."""
    if not isinstance(schema, dict) or not _is_local(schema):
        return schema
    rewriter = Rewriter(schema)
    impossible: list[Place] = []

    def change(place: Place, part: Schema) -> Schema | bool:
        try:
            if not needs(part):
                return part
            result = rewriter.plain(part)
        except TooMuch:
            raise
        except (Unwritable, *_NO_SCHEMA):
            return part
        if isinstance(result, bool):
            impossible.append(place)
            return result
        definitions = {name: part[name] for name in _DEFINITIONS if name in part}
        return {**definitions, **result}

    try:
        result = with_parts(schema, change)
    except TooMuch:
        return schema
    if impossible and (result := _without_impossible(result)) is False:
        raise InexpressibleSchema(f"Unsatisfiable schema: no value satisfies all of {impossible[0]}")
    return result


def _without_impossible(schema: Any) -> Any:
    """Returns the schema without alternatives that nothing satisfies."""
    if isinstance(schema, list):
        return [_without_impossible(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: part if name in _VALUES else _without_impossible(part) for name, part in schema.items()}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and False in schema[name]:
            schema[name] = [part for part in schema[name] if part is not False]
            if not schema[name]:
                return False
    properties = schema.get("properties")
    if not isinstance(properties, dict) or False not in properties.values():
        return schema
    if schema.get("type") == "object" and any(properties.get(name) is False for name in schema.get("required", ())):
        return False
    try:
        return without_absent(schema)
    except Unwritable:
        return schema


def _is_local(schema: Any) -> bool:
    """Returns whether every reference names a definition at the root, so that other parts may move."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            if any(name in part and not isinstance(part[name], dict) for name in _ELSEWHERE):
                return False
            reference = part.get("$ref")
            if isinstance(reference, str) and reference != "#" and _definition_path(reference) is None:
                return False
            pending += part.values()
    return True


def _definition_path(reference: str) -> tuple[str, str] | None:
    words = reference.split("/")
    if len(words) != 3 or words[0] != "#" or words[1] not in _DEFINITIONS:
        return None
    return words[1], unquote(words[2]).replace("~1", "/").replace("~0", "~")


class Rewriter:
    """Rewrites the parts of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work = 0
        self._depth = 0

    def plain(self, schema: Schema) -> Schema | bool:
        """Returns an equivalent schema with at most `anyOf`; False if nothing is valid."""
        leaves = [whole for leaf in self.alternatives(schema) for whole in self._entries(leaf)]
        return _choice([form for leaf in leaves for form in emitted(with_named_patterns(leaf))])

    @contextmanager
    def _counted_work(self, *schemas: Schema) -> Iterator[None]:
        sizes = (len(schema.get(name, ())) for schema in schemas for name in ("enum", "properties", "prefixItems"))
        self._work += 1 + sum(sizes) // 8
        self._depth += 1
        if self._work > MAX_WORK or self._depth > MAX_DEPTH:
            raise TooMuch("a choice between too many schemas")
        try:
            yield
        finally:
            self._depth -= 1

    # --- valid --------------------------------------------------------------------------------------------------------

    def alternatives(self, schema: Any) -> list[Schema]:
        """Returns plain schemas; a value is valid under `schema` if it is valid under one of them."""
        if schema is True or schema is False:
            return [{"type": list(ATOMS)}] if schema else []
        with self._counted_work():
            results = self._product([{"type": list(ATOMS)}], [self._leaf(schema)])
            for keyword, read in _APPLICATORS.items():
                if keyword in schema:
                    results = self._product(results, read(self, schema))
            return results

    def _leaf(self, schema: Schema) -> Schema:
        leaf = {name: value for name, value in schema.items() if name not in _NOT_PLAIN}
        if any(isinstance(leaf.get(name), bool) for name in BOUNDS):
            raise Unwritable("bounds of an old draft")
        leaf["type"] = atoms(leaf.get("type", list(ATOMS)))
        if "const" in leaf:
            leaf["enum"] = COMBINED["enum"](leaf.get("enum", [leaf["const"]]), [leaf.pop("const")])
        if leaf.get("unevaluatedProperties") is False:
            if any(name in schema for name in _APPLICATORS):
                raise Unwritable('"unevaluatedProperties" beside other schemas')
            del leaf["unevaluatedProperties"]
            leaf.setdefault("additionalProperties", False)
        return leaf

    def _product(self, first: list[Schema], second: list[Schema]) -> list[Schema]:
        if len(first) * len(second) > MAX_ALTERNATIVES * 4:
            raise TooMuch("a choice between too many schemas")
        joined = [both for a in first for b in second if (both := self._conjunction(a, b)) is not None]
        if len(joined) > MAX_ALTERNATIVES:
            raise TooMuch("a choice between too many schemas")
        return joined

    def _conjunction(self, first: Schema, second: Schema) -> Schema | None:
        """Returns alternatives for the values that are valid under both plain schemas."""
        with self._counted_work(first, second):
            both = {**second, **first}
            for name in (first.keys() & second.keys()) - _WITH_OTHERS - _NOTES:
                if name in COMBINED:
                    both[name] = COMBINED[name](first[name], second[name])
                elif identity(first[name]) != identity(second[name]):
                    raise Unwritable(f'two of "{name}"')
            both |= self._joined_properties(first, second) | self._joined_entries(first, second)
            if "enum" not in both:
                return simplified(both)
            values = [value for value in both["enum"] if self._allows(both, value)]
            notes = {name: value for name, value in both.items() if name in _NOTES}
            return simplified({**notes, "type": both["type"], "enum": values})

    def _joined_properties(self, first: Schema, second: Schema) -> Schema:
        if not all(_WITH_PROPERTIES & schema.keys() for schema in (first, second)):
            return {}
        if any("patternProperties" in schema for schema in (first, second)):
            raise Unwritable('"patternProperties" beside other schemas')
        joined: Schema = {}
        names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
        if names:
            joined["properties"] = {name: self._both(_property(first, name), _property(second, name)) for name in names}
        if any("additionalProperties" in schema for schema in (first, second)):
            others = [schema.get("additionalProperties", True) for schema in (first, second)]
            joined["additionalProperties"] = self._both(*others)
        return joined

    def _joined_entries(self, first: Schema, second: Schema) -> Schema:
        if not all({"items", "prefixItems"} & schema.keys() for schema in (first, second)):
            return {}
        length = max(len(schema.get("prefixItems", ())) for schema in (first, second))
        joined: Schema = {}
        if length:
            joined["prefixItems"] = [self._both(_entry(first, i), _entry(second, i)) for i in range(length)]
        if any("items" in schema for schema in (first, second)):
            joined["items"] = self._both(first.get("items", True), second.get("items", True))
        return joined

    def _both(self, first: Any, second: Any) -> Any:
        if first is True or first == {}:
            return second
        if second is True or second == {} or identity(first) == identity(second):
            return first
        forms = self._product(self.alternatives(first), self.alternatives(second))
        return _choice([form for leaf in forms for form in emitted(leaf)])

    # --- not valid ----------------------------------------------------------------------------------------------------

    def complements(self, schema: Any) -> list[Schema]:
        """Returns plain schemas; a value is invalid under `schema` if it is valid under one of them."""
        if schema is True or schema is False:
            return [] if schema else [{"type": list(ATOMS)}]
        with self._counted_work():
            results: list[Schema] = []
            for keyword, value in schema.items():
                if keyword in _COMPLEMENTS:
                    results += _COMPLEMENTS[keyword](self, value)
                elif keyword == "if":
                    results += self._product(self.alternatives(value), self.complements(schema.get("then", True)))
                    results += self._product(self.complements(value), self.complements(schema.get("else", True)))
                elif keyword not in _PASSED_OVER:
                    results += schema_complements.other(keyword, value)
            return [leaf for part in results if (leaf := simplified(part)) is not None]

    def _wrong_property(self, properties: Schema) -> list[Schema]:
        results = []
        for name, schema in properties.items():
            try:
                wrong = _choice([form for leaf in self.complements(schema) for form in emitted(leaf)])
            except TooMuch:
                raise
            except Unwritable as error:
                results.append(schema_complements.inexpressible(str(error), ["object"]))
                continue
            if wrong is not False:
                results.append({"type": ["object"], "required": [name], "properties": {name: wrong}})
        return results

    def _none_of(self, schemas: list[Any]) -> list[Schema]:
        return self._all_of([self.complements(schema) for schema in schemas])

    # --- joined schemas -----------------------------------------------------------------------------------------------

    def _all_of(self, choices: list[list[Schema]]) -> list[Schema]:
        results: list[Schema] = [{"type": list(ATOMS)}]
        for choice in choices:
            results = self._product(results, choice)
        return results

    def _referred(self, reference: str) -> Any:
        path = _definition_path(reference)
        if path is None:
            return self._root
        return self._root[path[0]][path[1]]

    def _one_of(self, branches: list[Any]) -> list[Schema]:
        if exclusive(branches):
            return [leaf for branch in branches for leaf in self.alternatives(branch)]
        results = []
        for i, branch in enumerate(branches):
            others = self._none_of([*branches[:i], *branches[i + 1 :]])
            results += self._product(self.alternatives(branch), others)
        return results

    def _condition(self, schema: Schema) -> list[Schema]:
        condition = schema["if"]
        return [
            *self._product(self.alternatives(condition), self.alternatives(schema.get("then", True))),
            *self._product(self.complements(condition), self.alternatives(schema.get("else", True))),
        ]

    def _dependencies(self, dependencies: dict[str, Any]) -> list[Schema]:
        choices = []
        for name, needed in dependencies.items():
            names, schema = (needed, True) if isinstance(needed, list) else ([], needed)
            there = {"type": list(ATOMS), "required": [name, *names]}
            absent = {"type": list(ATOMS), "properties": {name: False}}
            choices.append([absent, *self._product([there], self.alternatives(schema))])
        return self._all_of(choices)

    # --- values -------------------------------------------------------------------------------------------------------

    def _allows(self, leaf: Schema, value: Any) -> bool:
        """Returns whether a value is valid under a plain schema."""
        kind = atom_of(value)
        if kind not in leaf["type"]:
            return False
        for name, argument in leaf.items():
            if name in ANNOTATIONS or kind not in kinds_of(name) or name in ("type", "enum"):
                continue
            if name not in _CHECKS:
                raise Unwritable(f'"{name}" beside "enum"')
            if not _CHECKS[name](self, value, argument, leaf):
                return False
        return True

    def _valid(self, schema: Any, value: Any) -> bool:
        return any(self._allows(leaf, value) and _is_among(leaf, value) for leaf in self.alternatives(schema))

    def _contains(self, leaf: Schema, entries: list[Any]) -> bool:
        count = sum(self._valid(leaf["contains"], entry) for entry in entries)
        return bool(leaf.get("minContains", 1) <= count <= leaf.get("maxContains", math.inf))

    def _values(self, schema: Any) -> list[Any]:
        """Returns all valid values. Raises Unwritable if they are many."""
        values: list[Any] = []
        for leaf in self.alternatives(schema):
            if "enum" in leaf:
                values += leaf["enum"]
            elif leaf["type"] == ["integer"] and {"minimum", "maximum"} <= leaf.keys():
                whole = range(leaf["minimum"], leaf["maximum"] + 1)
                if len(whole) > MAX_LISTS:
                    raise Unwritable('"uniqueItems" of many values')
                values += [number for number in whole if self._allows(leaf, number)]
            elif set(leaf["type"]) <= {"null", "boolean"}:
                values += [None] * ("null" in leaf["type"]) + [False, True] * ("boolean" in leaf["type"])
            else:
                raise Unwritable('"uniqueItems" of any values')
        return [value for _, value in {identity(value): value for value in values}.items()]

    # --- lists --------------------------------------------------------------------------------------------------------

    def _entries(self, leaf: Schema) -> list[Schema]:
        """Returns equivalent schemas without rules that concern all items of a list."""
        if "enum" in leaf:
            return [leaf]
        if leaf.get("uniqueItems") and leaf.get("maxItems", math.inf) > 1:
            return [{"type": list(ATOMS), "enum": lists}] if (lists := self._unequal(leaf)) else []
        leaf = {name: value for name, value in leaf.items() if name != "uniqueItems"}
        if "contains" not in leaf:
            return [leaf]
        contained = leaf.pop("contains")
        minimum = leaf.pop("minContains", 1)
        if "maxContains" in leaf or minimum > 1 or leaf["type"] != ["array"]:
            raise Unwritable('"contains" more than once, or beside other types')
        return list(self._containing(leaf, contained)) if minimum else [leaf]

    def _containing(self, leaf: Schema, contained: Any) -> Iterator[Schema]:
        maximum = leaf.get("maxItems", math.inf)
        if maximum > MAX_POSITIONS:
            raise Unwritable('"contains" in a list of more entries')
        for place in range(maximum):
            entries = [_entry(leaf, i) for i in range(max(place + 1, len(leaf.get("prefixItems", ()))))]
            entries[place] = self._both(entries[place], contained)
            minimum = max(place + 1, leaf.get("minItems", 0))
            form = simplified({**leaf, "prefixItems": entries, "items": leaf.get("items", True), "minItems": minimum})
            if form is not None:
                yield form

    def _unequal(self, leaf: Schema) -> list[Any]:
        """Returns schemas of all lists whose items differ."""
        if leaf["type"] != ["array"]:
            raise Unwritable('"uniqueItems" beside other types')
        lists: list[list[Any]] = [[]]
        longest: list[list[Any]] = [[]]
        for place in itertools.count():
            if place >= leaf.get("maxItems", math.inf) or not longest:
                break
            values = self._values(_entry(leaf, place))
            if len(longest) * len(values) > MAX_LISTS * 4:
                raise Unwritable('"uniqueItems" of many values')
            longest = [[*start, value] for start in longest for value in values if _differs(value, start)]
            lists += longest
            if len(lists) > MAX_LISTS:
                raise Unwritable('"uniqueItems" of many values')
        rest = {name: value for name, value in leaf.items() if name not in ("uniqueItems", "items", "prefixItems")}
        return [entries for entries in lists if self._allows(rest, entries)]


def _property(schema: Schema, name: str) -> Any:
    properties = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _entry(schema: Schema, place: int) -> Any:
    entries = schema.get("prefixItems", [])
    return entries[place] if place < len(entries) else schema.get("items", True)


def _differs(value: Any, others: list[Any]) -> bool:
    return identity(value) not in {identity(other) for other in others}


def _is_among(leaf: Schema, value: Any) -> bool:
    return "enum" not in leaf or not _differs(value, leaf["enum"])


def _choice(schemas: list[Schema]) -> Schema | bool:
    different = list({identity(schema): schema for schema in schemas}.values())
    return different[0] if len(different) == 1 else {"anyOf": different} if different else False


_APPLICATORS: dict[str, Callable[[Rewriter, Schema], list[Schema]]] = {
    "$ref": lambda rewriter, schema: rewriter.alternatives(rewriter._referred(schema["$ref"])),
    "allOf": lambda rewriter, schema: rewriter._all_of([rewriter.alternatives(part) for part in schema["allOf"]]),
    "anyOf": lambda rewriter, schema: [leaf for part in schema["anyOf"] for leaf in rewriter.alternatives(part)],
    "oneOf": lambda rewriter, schema: rewriter._one_of(schema["oneOf"]),
    "not": lambda rewriter, schema: rewriter.complements(schema["not"]),
    "if": lambda rewriter, schema: rewriter._condition(schema),
    "dependentRequired": lambda rewriter, schema: rewriter._dependencies(schema["dependentRequired"]),
    "dependentSchemas": lambda rewriter, schema: rewriter._dependencies(schema["dependentSchemas"]),
    "dependencies": lambda rewriter, schema: rewriter._dependencies(schema["dependencies"]),
}
"""Keywords that join schemas, and the functions that return the resulting alternatives."""
_NOT_PLAIN = frozenset((*_APPLICATORS, "then", "else", *_DEFINITIONS))
_WITH_PROPERTIES = frozenset(("properties", "patternProperties", "additionalProperties"))
_WITH_OTHERS = _WITH_PROPERTIES | {"items", "prefixItems"}
"""Keywords whose meanings depend on each other."""
_NOTES = ANNOTATIONS - {"format"}
"""Annotations except `format`, which libraries enforce."""
_PASSED_OVER = _NOTES | {"then", "else", "minContains", "maxContains"}

_COMPLEMENTS: dict[str, Callable[[Rewriter, Any], list[Schema]]] = {
    "$ref": lambda rewriter, value: rewriter.complements(rewriter._referred(value)),
    "allOf": lambda rewriter, value: [leaf for part in value for leaf in rewriter.complements(part)],
    "anyOf": lambda rewriter, value: rewriter._none_of(value),
    "not": lambda rewriter, value: rewriter.alternatives(value),
    "properties": lambda rewriter, value: rewriter._wrong_property(value),
}

_Check = Callable[[Rewriter, Any, Any, Schema], bool]
_CHECKS: dict[str, _Check] = {
    "minimum": lambda _, value, bound, leaf: value >= bound,
    "maximum": lambda _, value, bound, leaf: value <= bound,
    "exclusiveMinimum": lambda _, value, bound, leaf: value > bound,
    "exclusiveMaximum": lambda _, value, bound, leaf: value < bound,
    "multipleOf": lambda _, value, factor, leaf: _is_multiple(value, factor),
    "minLength": lambda _, value, bound, leaf: len(value) >= bound,
    "maxLength": lambda _, value, bound, leaf: len(value) <= bound,
    "minItems": lambda _, value, bound, leaf: len(value) >= bound,
    "maxItems": lambda _, value, bound, leaf: len(value) <= bound,
    "minProperties": lambda _, value, bound, leaf: len(value) >= bound,
    "maxProperties": lambda _, value, bound, leaf: len(value) <= bound,
    "required": lambda _, value, names, leaf: all(name in value for name in names),
    "uniqueItems": lambda _, value, wanted, leaf: not wanted or len({identity(entry) for entry in value}) == len(value),
    "contains": lambda rewriter, value, part, leaf: rewriter._contains(leaf, value),
    **dict.fromkeys(("minContains", "maxContains"), lambda rewriter, value, _, leaf: True),
    **dict.fromkeys(
        ("items", "prefixItems"),
        lambda rewriter, value, _, leaf: all(rewriter._valid(_entry(leaf, i), entry) for i, entry in enumerate(value)),
    ),
    **dict.fromkeys(
        ("properties", "additionalProperties"),
        lambda rewriter, value, _, leaf: all(rewriter._valid(_property(leaf, name), value[name]) for name in value),
    ),
}
"""For each keyword of plain schemas, whether a value of the restricted type is valid."""


def _is_multiple(value: Any, factor: Any) -> bool:
    if isinstance(factor, int) and atom_of(value) == "integer":
        return int(value) % factor == 0
    raise Unwritable('"multipleOf" beside "enum"')
