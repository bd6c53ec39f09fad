"""Turns a dataclass whose fields are declared with `option(...)` into a command line, a config file and keywords.

All three end in the same typed `coerce`, so that a value means the same wherever it was written. Old spellings come
from `compat`; a flag that upstream has and we do not is accepted or refused by name. All problems of a command are
collected before any is reported.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from sglang.srt import compat
from sglang.srt.environ import warn_once
from sglang.srt.errors import Problems, UserError


@dataclass(frozen=True, slots=True)
class Option:
    """Description of a field for the command line, beyond its name, type and default."""

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    explained: tuple[str, ...] = ()
    """More values that pass: the plan refuses them and says why."""
    minimum: float | None = None
    maximum: float | None = None
    size: bool = False
    """An integer that may be written with a suffix; see `parse_size`."""
    json: bool = False
    """A JSON object, kept as text; a mapping is accepted and converted."""
    metavar: str | None = None


def option(default: Any, group: str, help: str, *aliases: str, **extra: Any) -> Any:
    """A dataclass field with its `Option`; `default` of `dataclasses.MISSING` makes it required."""
    return dataclasses.field(default=default, metadata={"option": Option(group, help, aliases, **extra)})


def flag(name: str) -> str:
    """Returns the flag of a ServerArgs field: "tp_size" -> "--tp-size"."""
    return "--" + name.replace("_", "-")


ANY_NUMBER = compat.ANY_NUMBER


def is_list(annotation: Any) -> bool:
    """Returns whether the field takes several values: `list[int] | None`."""
    return any(get_args(member) for member in get_args(annotation))


# --- values -----------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:([kmgt])(i?))?", re.IGNORECASE)
_SIZE_POWER = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BOOLEANS = {"true": True, "false": False}


def parse_size(text: str) -> int:
    """`16384`, `16k` = 16,000, `16Ki` = 16,384; k, M, G, T as in SGLang since 0.5.10. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError("expected an integer, optionally with a suffix k, M, G or T (16k = 16,000; 16Ki = 16,384)")
    number, letter, binary = match.groups()
    value = Decimal(number) * (1024 if binary else 1000) ** _SIZE_POWER[letter and letter.lower()]
    if value != int(value):
        raise ValueError("expected a whole number")
    return int(value)


def _scalar(kind: type, value: Any, spec: Option) -> Any:
    """`value` as `kind` (bool, int, float or str); raises ValueError with what was expected."""
    if kind is bool:
        if isinstance(value, str):
            value = _BOOLEANS.get(value.lower(), value)
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if isinstance(value, bool):
        raise ValueError(f"expected {'a string' if kind is str else 'a number'}")
    if kind is int:
        return _integer(value, spec)
    if kind is float:
        if not isinstance(value, (int, float, str)):
            raise ValueError("expected a number")
        try:
            return float(value)
        except ValueError:
            raise ValueError("expected a number") from None
    if spec.json:
        return _json_object(value)
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


def _integer(value: Any, spec: Option) -> int:
    if isinstance(value, str):
        if spec.size:
            return parse_size(value)
        try:
            return int(value)
        except ValueError:
            raise ValueError("expected an integer") from None
    if not isinstance(value, int):
        raise ValueError("expected an integer")
    return value


def _json_object(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected a JSON object ({error})") from None
    if not isinstance(parsed, dict):
        raise ValueError("expected a JSON object such as '{\"key\": 1}'")
    return str(value)


def _check_range(value: Any, spec: Option) -> None:
    if isinstance(value, float) and value != value:
        raise ValueError("expected a number")
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"must be at least {spec.minimum}")
    if spec.maximum is not None and value > spec.maximum:
        raise ValueError(f"must be at most {spec.maximum}")


def coerce(name: str, annotation: Any, spec: Option, value: Any) -> Any:
    """`value` (from the command line, YAML or Python) as the field's type, with its range and choices checked."""
    members = [member for member in get_args(annotation) if member is not type(None)] or [annotation]
    optional = len(get_args(annotation)) > len(members)
    kind = members[0] if optional else annotation
    if value is None and optional:
        return None
    element = get_args(kind)[0] if get_args(kind) else kind
    value = our_value(name, value) if isinstance(value, str) else value
    try:
        if get_args(kind):  # list[...]
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            result: Any = [_scalar(element, item, spec) for item in values]
        else:
            result = _scalar(element, value, spec)
        for item in result if isinstance(result, list) else [result]:
            _check_range(item, spec)
            if spec.choices and item not in (*spec.choices, *spec.explained):
                raise ValueError(compat.refusal(name, item) or f"must be one of {', '.join(spec.choices)}")
    except ValueError as error:
        hint = compat.VALUE_HINTS.get((name, value), "") if isinstance(value, str) else ""
        raise UserError(f"{flag(name)}: {error}; got {value!r}. {hint}".rstrip()) from None
    return result


def our_value(name: str, value: str) -> str:
    """Returns what this server calls a value of a field, or has instead: then it warns."""
    value = compat.VALUE_ALIASES.get((name, value), value)
    tuning = compat.TUNING_VALUES.get(name)
    if tuning is None or value not in tuning.values:
        return value
    warn_once(f"{flag(name)} {value} has no effect in sm120-sglang: {tuning.reason}.")
    return tuning.instead


# --- names ------------------------------------------------------------------------------------------------------------

Meaning = str | compat.NoEffect | compat.NotImplementedFlag
"""Meaning of a flag: the name of the field that it sets, or the reason why it has no effect or is refused."""


class OptionTable:
    """The options of one dataclass: names, aliases, abbreviations, and what to say about any other name."""

    def __init__(self, cls: type, groups: Sequence[str]) -> None:
        """groups: all groups of its options, in the order in which they are listed."""
        hints = get_type_hints(cls)
        options = [f for f in dataclasses.fields(cls) if "option" in f.metadata]
        options.sort(key=lambda f: groups.index(f.metadata["option"].group))
        self.fields = {f.name: (hints[f.name], f) for f in options}
        self.names: dict[str, str] = {}
        for name, (_, f) in self.fields.items():
            for spelling in (flag(name), *f.metadata["option"].aliases):
                assert spelling not in self.names, f"{spelling} is declared twice"
                self.names[spelling] = name
        self.meanings: dict[str, Meaning] = {f"--{name}": meaning for name, meaning in compat.NO_EFFECT.items()}
        self.meanings.update({f"--{name}": meaning for name, meaning in compat.UNIMPLEMENTED.items()})
        self.meanings.update({f"--{old}": self.names[f"--{new}"] for old, new in compat.RENAMED_FLAGS.items()})
        self.meanings.update(self.names)

    def spec(self, name: str) -> Option:
        """Returns the option of a field by the field's name."""
        result: Option = self.fields[name][1].metadata["option"]
        return result

    def max_values(self, name: str) -> int:
        """Returns how many words after the flag of this field can be its values."""
        annotation = self.fields[name][0]
        if annotation is bool:
            return 0
        return ANY_NUMBER if is_list(annotation) else 1

    def find(self, spelling: str) -> tuple[str, Meaning]:
        """The flag that `--spelling` abbreviates or is, and what it means. Raises UserError."""
        name, meaning = (spelling, self.meanings[spelling]) if spelling in self.meanings else self._complete(spelling)
        new = compat.RENAMED_FLAGS.get(name.removeprefix("--"))
        if new is not None:
            warn_once(f"{name} is another spelling of --{new}; please use the latter.")
        return name, meaning

    def _complete(self, spelling: str) -> tuple[str, Meaning]:
        """An abbreviation of one option of ours stands for it, whatever else upstream knows."""
        matches = {name: meaning for name, meaning in sorted(self.meanings.items()) if name.startswith(spelling)}
        fields = sorted({meaning for meaning in matches.values() if isinstance(meaning, str)})
        if len(fields) > 1:
            raise UserError(f"{spelling} is ambiguous: it could be {', '.join(map(flag, fields))}. Write it out.")
        foreign = {name: meaning for name, meaning in matches.items() if not isinstance(meaning, str)}
        if fields:
            name = flag(fields[0])
            if foreign:
                warn_once(
                    f"{spelling} is read as {name}, though it could be {next(iter(foreign))}; please write it out."
                )
            return name, fields[0]
        if not foreign:
            self._refuse(spelling)
        if len({meaning.reason for meaning in foreign.values()}) > 1:
            few = ", ".join([*list(foreign)[:5], *(["..."] if len(foreign) > 5 else [])])
            raise UserError(f"{spelling} is ambiguous: it could be {few}. Write it out.")
        name, meaning = next(iter(foreign.items()))
        return name if len(foreign) == 1 else spelling, meaning

    def _refuse(self, spelling: str) -> NoReturn:
        hint = self._suggestion(spelling.removeprefix("--"))
        raise UserError(f"Unknown option {spelling}.{hint} `--help` lists all options.")

    def _suggestion(self, bare: str) -> str:
        """Our word for an option of another server; or options of ours that are spelled nearly so; or else a flag of
        upstream, with what becomes of it."""
        if bare in compat.WORDS_OF_OTHERS:
            return f" Here that is {compat.WORDS_OF_OTHERS[bare]}."
        near = _near(bare, self.names)
        if near:
            return f" Did you mean {' or '.join(near)}?"
        for name in _near(bare, self.meanings)[:1]:
            match self.meanings[name]:
                case compat.NotImplementedFlag():
                    return f" Did you mean {name}, which is not implemented?"
                case compat.NoEffect():
                    return f" Did you mean {name}, which has no effect?"
                case str():
                    return f" Did you mean {name}?"
        return ""


def _near(bare: str, spellings: Iterable[str]) -> list[str]:
    """The dashes do not count: every two options share those."""
    known = [spelling.removeprefix("--") for spelling in spellings]
    return [f"--{name}" for name in difflib.get_close_matches(bare, known, n=2, cutoff=_NEAR)]


_NEAR = 0.8
"""Share of the letters that two spellings have in common, at which one may be a slip for the other."""

# --- sources ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TypedOption:
    """An option as it was typed: `--spelling`, `--spelling=attached`, and the words up to the next option."""

    spelling: str
    attached: str | None
    following: tuple[str, ...]

    def split(self, max_values: int) -> tuple[list[str], list[str]]:
        """Its values, and the words that are not: no more than `max_values` belong to it."""
        if self.attached is not None:
            return [self.attached], list(self.following)
        return list(self.following[:max_values]), list(self.following[max_values:])


_OPTION = re.compile(r"--[A-Za-z]")


def _split_words(argv: Sequence[str]) -> tuple[list[str], list[TypedOption]]:
    """The words before the first option, and the options."""
    starts = [i for i, word in enumerate(argv) if _OPTION.match(word)]
    options = []
    for start, end in itertools.pairwise([*starts, len(argv)]):
        spelling, equals, attached = argv[start].partition("=")
        options.append(TypedOption(spelling, attached if equals else None, tuple(argv[start + 1 : end])))
    return list(argv[: starts[0] if starts else len(argv)]), options


def parse_argv(table: OptionTable, argv: Sequence[str], problems: Problems) -> dict[str, Any]:
    """Field values that the command line or its `--config` file set, typed; what is wrong goes to `problems`."""
    strays, options = _split_words(argv)
    values: dict[str, Any] = {}
    from_file: dict[str, Any] = {}
    for word in options:
        if word.spelling == "--config":
            paths, rest = word.split(1)
            if paths:
                from_file |= read_config_file(table, Path(paths[0]), problems)
            else:
                problems.add("--config: expected the name of a file.")
            strays += rest
        else:
            strays += _take_option(table, word, values, problems)
    if strays:
        problems.add(f"Unrecognized arguments: {' '.join(strays)}. `--help` lists all options.")
    return from_file | coerce_values(table, values, problems)


def _take_option(table: OptionTable, word: TypedOption, values: dict[str, Any], problems: Problems) -> list[str]:
    """Puts the option's raw value into `values`; returns the words that belong to nothing."""
    try:
        name, meaning = table.find(word.spelling)
    except UserError as error:
        problems.add(str(error))
        return []
    if not isinstance(meaning, str):
        given, strays = word.split(meaning.max_values if isinstance(meaning, compat.NoEffect) else ANY_NUMBER)
        take_foreign(name, meaning, given, problems)
        return strays
    limit = table.max_values(meaning)
    given, strays = word.split(limit)
    if limit == 0:
        if given:
            problems.add(f"{name} takes no value; got {given[0]!r}.", meaning)
        values[meaning] = True
    elif not given:
        problems.add(f"{name}: expected {'a value' if limit == 1 else 'values'}.", meaning)
    else:
        values[meaning] = given[0] if limit == 1 else given
    return strays


def take_foreign(name: str, meaning: Meaning, values: Sequence[Any], problems: Problems) -> None:
    """Accepts an option of SGLang that is none here, with a warning, or refuses it by its reason."""
    if isinstance(meaning, compat.NoEffect):
        warn_once(f"{name} has no effect in sm120-sglang: {meaning.reason}.")
    elif isinstance(meaning, compat.NotImplementedFlag) and not (values and all(map(meaning.is_off, values))):
        problems.refuse(name, meaning.reason)


def coerce_values(table: OptionTable, values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """The values as their fields' types; those that are not go to `problems` and are left out."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        try:
            result[name] = coerce(name, table.fields[name][0], table.spec(name), value)
        except UserError as error:
            problems.add(str(error), name)
    return result


def resolve_keywords(table: OptionTable, values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Converts keyword arguments and config files, with names written with hyphens or underscores, as the command line
    is converted."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        try:
            name, meaning = table.find(flag(str(key)))
        except UserError as error:
            problems.add(str(error))
            continue
        if not isinstance(meaning, str):
            take_foreign(name, meaning, [value], problems)
        elif meaning in fields:
            problems.add(f"{key} sets {flag(meaning)} a second time; keep one of the two spellings.", meaning)
        else:
            fields[meaning] = value
    return coerce_values(table, fields, problems)


def read_config_file(table: OptionTable, path: Path, problems: Problems) -> dict[str, Any]:
    """The file's values, typed; what is wrong goes to `problems`, with the file's name."""
    import yaml

    in_file = Problems(where=f"--config {path}: ")
    values: dict[str, Any] = {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        in_file.add(f"{error.strerror}.")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        in_file.add(f"not valid YAML: {error}")
    else:
        if isinstance(content, dict):
            values = resolve_keywords(table, content, in_file)
        elif content is not None:
            in_file.add(f"must hold a mapping such as `page-size: 16`, not a {type(content).__name__}.")
    problems.extend(in_file)
    return values
