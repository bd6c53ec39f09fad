"""Requests that the types of a client's library allow: each field of each record with each kind of value, one by one.

The libraries are generated from the descriptions of the APIs, so that a new release brings the fields that its API has
got. The walk goes along the structs that this server reads the same JSON with, as deep as it has any.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from typing_extensions import NotRequired, Required, get_type_hints, is_typeddict

Embed = Callable[[Any], Any]
"""The whole request with a value in its place."""
Kind = type[msgspec.Struct]
Overrides = Mapping[tuple[str, str], tuple[Kind, ...]]
"""The structs of fields that a struct keeps as they came."""
Given = Mapping[str, Mapping[str, Any]]
"""Fields of records, by type or by the field that has the record, which any such record gets."""


class Case(NamedTuple):
    """A field of a record with one kind of value. `label`: of the record, "" for the whole request. `value`: the only
    one of its kind as JSON has it, or the type of a record. `is_read`: there is a struct with this field, and for such
    a record."""

    label: str
    field: str
    value: str | None
    is_read: bool
    request: Any

    @property
    def names(self) -> list[str]:
        """The names that a verdict may have, the closest first."""
        labelled = f"{self.label}.{self.field}" if self.label else self.field
        names = [labelled, self.field] if self.label else [labelled]
        return names if self.value is None else [*(f"{name}={self.value}" for name in names), *names]


class Walk:
    """Walks the records of a request, each once. What `is_decided` by its name is not entered."""

    def __init__(self, overrides: Overrides, given: Given, is_decided: Callable[[Case], bool]) -> None:
        self._overrides = overrides
        self._given = given
        self._is_decided = is_decided
        self._seen: set[Any] = set()

    def cases(self, record: Any, struct: Kind, embed: Embed, label: str = "") -> Iterator[Case]:
        if record in self._seen:
            return
        self._seen.add(record)
        required = self._sample(record, struct, label)
        for field, hint in _hints(record).items():

            def place(value: Any, field: str = field) -> Any:
                return embed({**required, field: value})

            given = next((values[field] for values in self._given_to(label, required) if field in values), None)
            if given is not None:
                yield Case(label, field, None, field in _fields(struct), place(given))
            for option, wrap in _options(hint, lambda value: value):
                if given is not None and _is_any(option):
                    continue

                def embedded(value: Any, wrap: Embed = wrap, place: Embed = place) -> Any:
                    return place(wrap(value))

                yield from self._option(option, struct, field, label, embedded)

    def _option(self, option: Any, struct: Kind, field: str, label: str, embedded: Embed) -> Iterator[Case]:
        is_field = field == "type" or field in _fields(struct)
        if not is_typeddict(option):
            for value, chosen in _values(option):
                yield Case(label, field, _text(value) if chosen else None, is_field, embedded(value))
            return
        structs = self._structs(struct, field)
        inner = self._match(option, structs, field)
        sample = self._sample(option, inner, field)
        tag = sample.get("type") or sample.get("role")
        case = Case(label, field, tag, is_field and (inner is not None or not structs), embedded(sample))
        yield case
        if inner is not None and not self._is_decided(case):
            yield from self.cases(option, inner, embedded, str(tag or field))

    def _structs(self, struct: Kind, field: str) -> tuple[Kind, ...]:
        if field not in _fields(struct):
            return ()
        given = self._overrides.get((struct.__name__, field))
        return given if given is not None else tuple(_structs_in(get_type_hints(struct).get(field)))

    def _match(self, record: Any, structs: tuple[Kind, ...], label: str) -> Kind | None:
        return next((struct for struct in structs if _reads(struct, self._sample(record, struct, label))), None)

    def _sample(self, record: Any, struct: Kind | None, label: str) -> dict[str, Any]:
        """A record with its required fields, and its type."""
        hints = _hints(record)
        required = {name for name, hint in hints.items() if get_origin(hint) is Required} | record.__required_keys__
        wanted = [name for name in hints if name in required or name == "type"]
        sample = {name: self._one(hints[name], struct, name) for name in wanted}
        for given in self._given_to(label, sample):
            sample |= {name: value for name, value in given.items() if name in hints}
        return sample

    def _given_to(self, label: str, sample: dict[str, Any]) -> list[Mapping[str, Any]]:
        return [self._given.get(name, {}) for name in (label, str(sample.get("type")))]

    def _one(self, hint: Any, struct: Kind | None, field: str) -> Any:
        """A value that is read, if any is."""
        structs = () if struct is None else self._structs(struct, field)
        options = list(_options(hint, lambda value: value))
        for option, wrap in options:
            if not is_typeddict(option):
                return wrap(next(_values(option), ("x",))[0])
            inner = self._match(option, structs, field)
            sample = self._sample(option, inner, field)
            if inner is not None and _converts(inner, sample):
                return wrap(sample)
        option, wrap = options[0]
        return wrap(self._sample(option, None, field))


def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _fields(struct: Kind) -> dict[str, None]:
    config = struct.__struct_config__
    return dict.fromkeys([*struct.__struct_encode_fields__, *([config.tag_field] if config.tag_field else [])])


def _structs_in(hint: Any) -> Iterator[Kind]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for arg in get_args(hint):
        yield from _structs_in(arg)


def _reads(struct: Kind, sample: dict[str, Any]) -> bool:
    config = struct.__struct_config__
    if config.tag_field:
        return bool(sample.get(config.tag_field) == config.tag)
    return _converts(struct, sample)


def _converts(struct: Kind, sample: dict[str, Any]) -> bool:
    try:
        msgspec.convert(sample, struct, strict=False)
    except msgspec.ValidationError:
        return False
    return True


def _options(hint: Any, wrap: Embed) -> Iterator[tuple[Any, Embed]]:
    """The kinds of values, each with what makes the field's value of one."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired, Annotated):
        yield from _options(args[0], wrap)
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _options(arg, wrap)
    elif origin is not None and origin is not Literal and origin is not dict and args:
        yield from _options(args[0], lambda value: wrap([value]))  # a list, by whichever name
    elif isinstance(hint, TypeVar):
        yield str, wrap
    else:
        yield hint, wrap


_PLAIN: dict[Any, tuple[Any, ...]] = {
    str: ("x",),
    int: (1,),
    float: (0.5,),
    bool: (True, False),
    type(None): (None,),
    object: ({},),
    Any: ({},),
}


def _values(option: Any) -> Iterator[tuple[Any, bool]]:
    """Values of a kind, and whether they are the only ones that it has."""
    if get_origin(option) is Literal:
        for value in get_args(option):
            yield value, True
    elif get_origin(option) is dict or option is dict:
        args = get_args(option)
        yield ({"x": next(_values(args[1]))[0]} if len(args) == 2 else {}), False
    else:
        for value in _PLAIN.get(option, ()):  # records of answers and files are objects of Python's
            yield value, option is bool or value is None


def _is_any(option: Any) -> bool:
    """Returns whether any value of this kind is as good as another."""
    return not is_typeddict(option) and get_origin(option) is not Literal and option not in (bool, type(None))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
