"""Writes docs/fields.md: what becomes of each field of the requests that the libraries of OpenAI and Anthropic send.

python scripts/fields_page.py

`request_fields.json` has the verdicts that the server's own structs and `upstream_interface.json` do not give:
`nothing` for fields that ask for nothing here, and `refused` for values and parts of fields. A name is that of a field
of the request, or of a part: `type of the part.field`; `=value` says for which value, or for which type of part.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.http_body import Body

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("request_fields.json").read_text(encoding="utf-8"))

INTRODUCTION = """\
# Fields of requests

What becomes of each field that the `openai` and `anthropic` libraries can send. The rule: a field that asks for
nothing, or only for a service that a local server cannot give (hints about caches, tiers, metadata, telemetry, betas),
never ends a request; a field that would change the answer and is not done is refused with status 400 and its name. A
test walks the types of both libraries, and fails for a field of a new release that has no verdict. The page is
generated:

    python scripts/fields_page.py

A part of a request is named by its type: `document.citations` is the field `citations` of a content block of the type
`document`; `thinking=between_tools` is one value of a field, or one type of part. Fields that neither library knows and
that no other server defines are ignored. Headers such as `anthropic-beta` ask for nothing. `/v1/responses/input_tokens`
and `/v1/messages/count_tokens` read what concerns the input as `/v1/responses` and `/v1/messages` do.
"""


@dataclass(frozen=True, slots=True)
class Row:
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Form:
    """A kind of request. `body`: the struct that reads it. `clients`: types of the libraries, as `module:name`."""

    title: str
    """Empty where another form has these fields and more."""
    route: str
    body: type[Body]
    clients: tuple[str, ...]
    nothing: tuple[Row, ...]
    refused: tuple[Row, ...]

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """nothing or refused, by name."""
        rows = [("nothing", self.nothing), ("refused", self.refused)]
        named = {name: verdict for verdict, group in rows for row in group for name in row.names}
        return {**dict.fromkeys(self.body.unsupported, "refused"), **named}

    @property
    def done(self) -> list[str]:
        return [name for name in self.body.__struct_encode_fields__ if name not in self.verdicts]


def load(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def forms() -> list[Form]:
    return [
        Form(
            form.get("title", ""),
            form["route"],
            load("sglang.srt.entrypoints." + form["body"]),
            tuple(form["clients"]),
            tuple(_rows("nothing", form["name"])),
            tuple(_rows("refused", form["name"])),
        )
        for form in _DATA["forms"]
    ]


def _rows(verdict: str, form: str) -> Iterator[Row]:
    for row in _DATA[verdict]:
        if form in row["forms"]:
            yield Row(tuple(row["names"]), row["reason"])


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(form) for form in forms() if form.title)])


def _section(form: Form) -> str:
    own: dict[str, list[str]] = {}
    for name, field in form.body.unsupported.items():
        own.setdefault(field.reason, []).append(name)
    refused = [*((tuple(names), reason) for reason, names in own.items()), *((r.names, r.reason) for r in form.refused)]
    return "\n".join(
        [
            f"## {form.title}\n\n`{form.route}`\n",
            f"Done: {', '.join(f'`{name}`' for name in form.done)}.\n",
            _table("asks for nothing", "because", ((row.names, row.reason) for row in form.nothing)),
            _table("refused", "because", refused),
        ]
    )


def _table(title: str, reason: str, rows: Iterable[tuple[tuple[str, ...], str]]) -> str:
    lines = [f"| {title} | {reason} |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for names, why in rows]
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
