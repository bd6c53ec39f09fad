"""Names of grammars as clients know them: a structural tag may be what the server has made of something else."""

from __future__ import annotations

import re
from typing import Any

MADE_OF = "made_of"
"""The first key of a tag that the server has made. It is of no meaning for the grammar."""
_BEGINNING = re.compile(rf'\{{"{MADE_OF}":"(json_schema|regex|ebnf|tools)",')


def made_of(wanted: str, form: dict[str, Any]) -> dict[str, Any]:
    """The tag with the format `form`, which messages to the client call `wanted`, the name of a parameter."""
    return {MADE_OF: wanted, "type": "structural_tag", "format": form}


def client_name(kind: str, source: str) -> str:
    origin = _BEGINNING.match(source) if kind == "structural_tag" else None
    return kind if origin is None else origin[1]
