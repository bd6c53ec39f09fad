"""Names under which clients know grammars: a structural tag may be made by the server from another parameter."""

from __future__ import annotations

import re
from typing import Any

MADE_OF = "made_of"
"""The first key of a tag that the server has made; grammars ignore it."""
_BEGINNING = re.compile(rf'\{{"{MADE_OF}":"(json_schema|regex|ebnf|tools)",')


def tag_of_format(wanted: str, form: dict[str, Any]) -> dict[str, Any]:
    """Returns a tag with the format `form`. `wanted`: the parameter that messages to the client name instead of the
    tag."""
    return {MADE_OF: wanted, "type": "structural_tag", "format": form}


def client_name(kind: str, source: str) -> str:
    """Returns the parameter that a client gave for a grammar of this kind and source."""
    origin = _BEGINNING.match(source) if kind == "structural_tag" else None
    return kind if origin is None else origin[1]
