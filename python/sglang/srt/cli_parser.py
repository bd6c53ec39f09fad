"""Adds the server's options to parsers of argparse: the one that prints `--help`, and those of programs that have
options of their own beside them, such as trainers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang.srt import compat
from sglang.srt.cli_args import ANY_NUMBER, Meaning, Option, OptionTable, coerce, flag, is_list, take_foreign
from sglang.srt.errors import Problems, UserError


def build_parser(table: OptionTable, prog: str) -> argparse.ArgumentParser:
    """Builds the parser whose only use is to print `--help`."""
    usage = f"{prog} --model-path MODEL [options]"
    parser = argparse.ArgumentParser(prog=prog, usage=usage)
    parser.add_argument("--config", metavar="FILE", help="YAML file of options (page-size: 16); the command line wins.")
    groups: dict[str, Any] = {}
    for name in table.fields:
        group = table.spec(name).group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add(table, name, groups[group].add_argument)
    return parser


def add_options(table: OptionTable, parser: argparse.ArgumentParser) -> None:
    """Adds all options to somebody's parser, and SGLang's others, which are accepted or refused as on our own command
    line.

    Each goes through `parser.add_argument`, which trainers replace to give the options a prefix, and has the
    destination that they look for.
    """
    for name in table.fields:
        _add(table, name, parser.add_argument, dest=destination(table, name))
    for old, new in compat.RENAMED_FLAGS.items():
        name = table.names[f"--{new}"]
        parser.add_argument(f"--{old}", **_settings(table, name) | _hidden(destination(table, name)))
    for spelling, meaning in table.meanings.items():
        if not isinstance(meaning, str):
            count = meaning.max_values if isinstance(meaning, compat.NoEffect) else ANY_NUMBER
            settings = _hidden(flag_name(spelling)) | {"nargs": {0: 0, 1: "?"}.get(count, "*")}
            settings["action"] = partial(_Foreign, spelling=spelling, meaning=meaning)
            parser.add_argument(spelling, **settings)


def destination(table: OptionTable, name: str) -> str:
    """Returns the attribute of a parsed namespace that has a field's value: SGLang's name of it, which has the long
    word for sizes (`data_parallel_size` for `dp_size`)."""
    long = [alias for alias in table.spec(name).aliases if alias.endswith("-parallel-size")]
    return flag_name(long[0]) if long else name


def flag_name(spelling: str) -> str:
    """Returns the name that Python has for a flag: "--tp-size" -> "tp_size"."""
    return spelling.removeprefix("--").replace("-", "_")


def _add(table: OptionTable, name: str, add_argument: Callable[..., Any], dest: str | None = None) -> None:
    add_argument(flag(name), *table.spec(name).aliases, **_settings(table, name) | {"dest": dest or name})


def _settings(table: OptionTable, name: str) -> dict[str, Any]:
    annotation, field = table.fields[name]
    spec = table.spec(name)
    needed = field.default is dataclasses.MISSING
    settings: dict[str, Any] = {"help": _help_text(spec, field.default)}
    settings |= {"required": True} if needed else {"default": field.default}
    if annotation is bool:
        return settings | {"action": "store_true"}
    return settings | {
        "metavar": spec.metavar or ("|".join(spec.choices) if spec.choices else name.upper()),
        "nargs": "+" if is_list(annotation) else None,
        "type": partial(_typed, name, annotation, spec),
    }


def _hidden(dest: str) -> dict[str, Any]:
    return {"dest": dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}


def _help_text(spec: Option, default: Any) -> str:
    shown = "" if any(default is each for each in (None, False, dataclasses.MISSING)) else f" Default: {default}."
    return (spec.help + shown).replace("%", "%%")


def _typed(name: str, annotation: Any, spec: Option, word: str) -> Any:
    """Returns one word as the field's type, or as that of an element of a list."""
    try:
        value = coerce(name, annotation, spec, word)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value[0] if is_list(annotation) else value


class _Foreign(argparse.Action):
    """An option of SGLang that is none here."""

    def __init__(self, *args: Any, spelling: str, meaning: Meaning, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.spelling, self.meaning = spelling, meaning

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        words: Sequence[str] = [values] if isinstance(values, str) else values or []
        problems = Problems()
        take_foreign(self.spelling, self.meaning, words, problems)
        try:
            problems.raise_if_any()
        except UserError as error:
            parser.error(str(error))
