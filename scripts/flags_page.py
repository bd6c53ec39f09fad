"""Writes docs/flags.md: every option, every flag of SGLang that is none here, and the environment variables.

python scripts/flags_page.py
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from sglang.srt import compat, environ
from sglang.srt.cli_args import Option, flag, is_list
from sglang.srt.server_args import TABLE
from sglang.srt.upstream_interface import ACCEPTED, REFUSED, FlagGroup

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
LINE = 120
"""Longest line of prose, in characters."""

INTRODUCTION = """\
# Flags

Look up an option of `sglang serve`, `python -m sglang.launch_server` or `Engine(...)` by its group. If you come with a
command for SGLang, vLLM or llama.cpp, the tables behind the options say what happens to its other flags. This page is
generated:

    python scripts/flags_page.py

- An option may be abbreviated as long as it stands for one option. `--name value` and `--name=value` are the same.
- `--config FILE.yaml` reads options from a file (`page-size: 16`); the command line wins.
- A *size* is an integer that may have a suffix k, M, G or T, as in SGLang since 0.5.10: `16k` is 16,000, `16Ki` 16,384.
- All problems of a command are reported at once.
"""

ACCEPTED_INTRODUCTION = """\
## Accepted with one warning

They only tune, and there is nothing to switch: the answers are the same without them.
"""

REFUSED_INTRODUCTION = """\
## Refused by name

They would change answers, replies or who may connect, or ask for a feature that does not exist here. The values in
brackets ask for nothing and pass.
"""


def page() -> str:
    """The text of docs/flags.md."""
    sections = [
        INTRODUCTION,
        *_options(),
        _other_spellings(),
        ACCEPTED_INTRODUCTION + _groups(ACCEPTED),
        REFUSED_INTRODUCTION + _groups(REFUSED),
        _environment(),
    ]
    return "\n".join(sections)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _options() -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in TABLE.fields:
        groups.setdefault(TABLE.spec(name).group, []).append(name)
    for group, names in groups.items():
        rows = [_option_row(name) for name in names]
        yield f"## Options: {group}\n\n" + _table(("option", "value", "default", "meaning"), rows)


def _option_row(name: str) -> tuple[str, ...]:
    annotation, field = TABLE.fields[name]
    spec = TABLE.spec(name)
    default = "" if field.default is None or field.default is False else f"`{field.default}`"
    if field.default is dataclasses.MISSING:
        default = "required"
    return _code((flag(name), *spec.aliases)), _value(annotation, spec), default, spec.help


def _value(annotation: Any, spec: Option) -> str:
    if spec.choices:
        return _code(spec.choices)
    if annotation is bool:
        return ""
    kind = annotation if isinstance(annotation, type) and not get_args(annotation) else get_args(annotation)[0]
    if is_list(annotation):
        return "texts" if "str" in str(annotation) else "integers"
    if spec.json:
        return "JSON object"
    if spec.size:
        return "size"
    return {int: "integer", float: "number", str: "text"}[kind]


def _values(name: str, values: Iterable[str]) -> str:
    """Returns the flag of a field, and some values of it."""
    return f"`{flag(name)}` with {_code(sorted(values))}"


def _other_spellings() -> str:
    flags = [(f"`--{old}`", f"`--{new}`") for old, new in compat.RENAMED_FLAGS.items()]
    values = [(f"`{flag(name)} {old}`", f"`{new}`") for (name, old), new in compat.VALUE_ALIASES.items()]
    tuning = [
        (_values(name, row.values), f"`{row.instead}`: {row.reason}") for name, row in compat.TUNING_VALUES.items()
    ]
    refused = [
        (_values(name, row.values), f"refused: {row.reason.format('NAME')}")
        for name, row in compat.REFUSED_VALUES.items()
    ]
    kernels = [
        (_values(name, names), "the kernel that the plan chooses, with a warning")
        for name, names in compat.FOREIGN_KERNELS.items()
    ]
    others = [(f"`--{old}`", ours) for old, ours in compat.WORDS_OF_OTHERS.items()]
    return (
        "## Other spellings\n\n"
        + _table(("of other releases", "read as"), [*flags, *values, *tuning, *kernels, *refused])
        + "\n## Words of vLLM and llama.cpp\n\nThey are refused, with the word that means the same here.\n\n"
        + _table(("there", "here"), others)
    )


def _groups(groups: tuple[FlagGroup, ...]) -> str:
    return "".join(
        f"\n{_wrapped(f'**{group.title}**: {group.reason}.')}"
        f"\n{_wrapped(', '.join(map(_upstream_flag, sorted(group.names))))}\n"
        for group in groups
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False)


def _upstream_flag(word: str) -> str:
    name = word.partition("=")[0]
    refusal = compat.UNIMPLEMENTED.get(name)
    harmless = sorted(value for value in refusal.harmless if value) if refusal else []
    return f"`--{name}`" + (f" ({_code(harmless)})" if harmless else "")


def _environment() -> str:
    known = sorted(vars(environ.Environment).items())
    rows = [(f"`{name}`", variable.description) for name, variable in known if isinstance(variable, environ.EnvVar)]
    ignored = [(f"`{name}`", f"No effect: {reason}.") for name, reason in sorted(environ.IGNORED.items())]
    text = (
        "## Environment variables\n\nThe older spelling `SGL_*` is read too. Another variable `SGLANG_*` has no effect,"
        " and is named in a warning.\n\n"
    )
    return text + _table(("variable", "meaning"), [*rows, *ignored])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
