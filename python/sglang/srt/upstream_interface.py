"""Flags, fields and routes that SGLang's releases know and this server does not have, read from
`upstream_interface.json`.

`flags` are those that are no option here. Accepted with one warning is what only tunes: the answers are the same
without it. Refused is what would change answers, replies or who may connect, and what asks for a feature that does not
exist. When a feature arrives, its names leave the file and become fields of `ServerArgs`. Names are without their
dashes: `name` takes no value, `name=` takes one, `name=...` any number. For a refused flag `name=a|b` lists values that
ask for nothing and pass.

`fields` are fields of requests, with the forms of requests in which they are refused. `neutral` lists values, besides
the empty ones, that ask for nothing.

`routes` are answered with a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Names with one reason, which completes `... has no effect: REASON.` or `... is not implemented: REASON`."""

    title: str
    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is refused, with the reason, and the values besides the empty ones that ask for what the server does
    anyway."""

    reason: str
    neutral: tuple[Any, ...] = ()


def _groups(kind: str) -> tuple[FlagGroup, ...]:
    return tuple(FlagGroup(row["title"], row["reason"], tuple(row["names"])) for row in _DATA["flags"][kind])


def unsupported_fields(form: str) -> Mapping[str, Unsupported]:
    """The fields that are refused in requests of one form, for example "chat"."""
    rows = [row for row in _DATA["fields"] if form in row["forms"]]
    return {name: Unsupported(row["reason"], tuple(row.get("neutral", ()))) for row in rows for name in row["names"]}


ACCEPTED = _groups("accepted")
REFUSED = _groups("refused")
REFUSED_ROUTES: Mapping[str, str] = {path: row["reason"] for row in _DATA["routes"] for path in row["paths"]}
