"""Turns a dataclass whose fields are declared with `option(...)` into a command line, a config file and keywords.

All three end in the same typed `coerce`, so that a value means the same wherever it was written. Old spellings come
from `compat`; a flag that upstream has and we do not is refused by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from sglang.srt import compat
from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError
from sglang.version import __version__


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line must know of a field beyond its name, type and default."""

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    size: bool = False
    """An integer that may be written with a suffix: 16k is 16384, 1m is 1048576."""
    json: bool = False
    """A JSON object, kept as text; a mapping is accepted and converted."""
    metavar: str | None = None


def option(default: Any, group: str, help: str, *aliases: str, **extra: Any) -> Any:
    """A dataclass field with its `Option`; `default` of `dataclasses.MISSING` makes it required."""
    return dataclasses.field(default=default, metadata={"option": Option(group, help, aliases, **extra)})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# --- values -----------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmg]?)", re.IGNORECASE)
_SIZE_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_BOOLEANS = {"true": True, "false": False}


def parse_size(text: str) -> int:
    """`16384`, `16k`, `1.5m`; k, m, g are binary. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError("expected an integer, optionally with a suffix k, m or g (16k = 16384)")
    value = float(match[1]) * _SIZE_FACTOR[match[2].lower()]
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
        raise ValueError(f"must be at least {spec.minimum:g}")
    if spec.maximum is not None and value > spec.maximum:
        raise ValueError(f"must be at most {spec.maximum:g}")


def coerce(name: str, annotation: Any, spec: Option, value: Any) -> Any:
    """`value` (from the command line, YAML or Python) as the field's type, with its range and choices checked."""
    members = [member for member in get_args(annotation) if member is not type(None)] or [annotation]
    optional = len(get_args(annotation)) > len(members)
    kind = members[0] if optional else annotation
    if value is None and optional:
        return None
    element = get_args(kind)[0] if get_args(kind) else kind
    value = compat.VALUE_ALIASES.get((name, value), value) if isinstance(value, str) else value
    try:
        if get_args(kind):  # list[...]
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            result: Any = [_scalar(element, item, spec) for item in values]
        else:
            result = _scalar(element, value, spec)
        for item in result if isinstance(result, list) else [result]:
            _check_range(item, spec)
            if spec.choices and item not in spec.choices:
                raise ValueError(f"must be one of {', '.join(spec.choices)}")
    except ValueError as error:
        raise UserError(f"{flag(name)}: {error}; got {value!r}.") from None
    return result


# --- names ------------------------------------------------------------------------------------------------------------


class OptionTable:
    """The options of one dataclass: names, aliases, abbreviations, and what to say about any other name."""

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls)
        self.fields = {f.name: (hints[f.name], f) for f in dataclasses.fields(cls) if "option" in f.metadata}
        self.names: dict[str, str] = {}
        for name, (_, f) in self.fields.items():
            for spelling in (flag(name), *f.metadata["option"].aliases):
                assert spelling not in self.names, f"{spelling} is declared twice"
                self.names[spelling] = name

    def spec(self, name: str) -> Option:
        result: Option = self.fields[name][1].metadata["option"]
        return result

    def find(self, spelling: str) -> str | compat.NoEffect:
        """The field that `--spelling` means, or the reason why it means nothing here. Raises UserError."""
        if spelling in self.names:
            return self.names[spelling]
        bare = spelling.removeprefix("--")
        if bare in compat.RENAMED_FLAGS:
            new = compat.RENAMED_FLAGS[bare]
            warn_once(f"{spelling} is another spelling of --{new}; please use the latter.")
            return self.names[f"--{new}"]
        if bare in compat.NO_EFFECT:
            return compat.NO_EFFECT[bare]
        if bare in compat.UNIMPLEMENTED:
            raise not_implemented(spelling, compat.UNIMPLEMENTED[bare])
        candidates = sorted({name for known, name in self.names.items() if known.startswith(spelling)})
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise UserError(f"{spelling} is ambiguous: it could be {', '.join(map(flag, candidates))}. Write it out.")
        self._refuse(spelling)

    def _refuse(self, spelling: str) -> NoReturn:
        bare = spelling.removeprefix("--")
        abbreviated = [known for known in compat.UNIMPLEMENTED if known.startswith(bare)]
        if len(abbreviated) == 1:
            raise not_implemented(f"--{abbreviated[0]}", compat.UNIMPLEMENTED[abbreviated[0]])
        near = difflib.get_close_matches(spelling, self.names, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"Unknown option {spelling}.{hint} `--help` lists all options.")


def not_implemented(what: str, hint: str) -> UserError:
    return UserError(f"{what} is not implemented in sm120-sglang {__version__}: {hint}")


# --- sources ----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message[0].upper() + message[1:] + ". `--help` lists all options.")


def build_parser(table: OptionTable, prog: str) -> argparse.ArgumentParser:
    usage = f"{prog} --model-path MODEL [options]"
    parser = _Parser(prog=prog, usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file of options (page-size: 16); the command line wins.")
    groups: dict[str, Any] = {}
    for name, (annotation, f) in table.fields.items():
        spec = table.spec(name)
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        settings: dict[str, Any] = {"dest": name, "help": _help_text(spec, f.default)}
        if annotation is bool:
            settings["action"] = "store_true"
        else:
            settings["metavar"] = spec.metavar or ("|".join(spec.choices) if spec.choices else name.upper())
            is_list = any(get_args(member) for member in get_args(annotation))
            settings["nargs"] = "+" if is_list else None
        groups[spec.group].add_argument(flag(name), *spec.aliases, **settings)
    return parser


def _help_text(spec: Option, default: Any) -> str:
    shown = "" if default in (None, False, dataclasses.MISSING) else f" Default: {default}."
    return (spec.help + shown).replace("%", "%%")


def parse_argv(table: OptionTable, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Field values that the command line or its `--config` file set, typed. Raises UserError."""
    explicit = vars(build_parser(table, prog).parse_args(_canonical_argv(table, argv)))
    config = explicit.pop("config", None)
    from_file = read_config_file(table, Path(config)) if config is not None else {}
    return from_file | coerce_values(table, explicit)


def _canonical_argv(table: OptionTable, argv: Sequence[str]) -> list[str]:
    """Every option written out under its present name, options without effect removed."""
    result: list[str] = []
    skip_value = False
    for word in argv:
        if skip_value and not word.startswith("--"):
            skip_value = False
            continue
        skip_value = False
        spelling, equals, value = word.partition("=")
        if not re.match(r"--[A-Za-z]", word) or spelling in ("--config", "--help"):
            result.append(word)
            continue
        found = table.find(spelling)
        if isinstance(found, compat.NoEffect):
            warn_once(f"{spelling} has no effect in sm120-sglang: {found.reason}.")
            skip_value = found.takes_value and not equals
            continue
        result.append(flag(found) + equals + value)
    return result


def coerce_values(table: OptionTable, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: coerce(name, table.fields[name][0], table.spec(name), value) for name, value in values.items()}


def resolve_keywords(table: OptionTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """As the command line, for names written with hyphens or underscores: keyword arguments and config files."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        target = table.find(flag(str(key)))
        if isinstance(target, compat.NoEffect):
            warn_once(f"{key} has no effect in sm120-sglang: {target.reason}.")
        elif target in found:
            raise UserError(f"{key} sets {flag(target)} a second time; keep one of the two spellings.")
        else:
            found[target] = value
    return coerce_values(table, found)


def read_config_file(table: OptionTable, path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold a mapping such as `page-size: 16`, not a {type(content).__name__}.")
    try:
        return resolve_keywords(table, content)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from None
