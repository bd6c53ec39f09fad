"""Parsing of structural tags as clients send them."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.sampling.grammar_names import MADE_OF


def as_format(source: str) -> dict[str, Any]:
    """Returns the tag's format; converts the older form (`structures` and `triggers`). Raises ValueError."""
    tag = json.loads(source)
    if not isinstance(tag, dict):
        raise ValueError("expected a JSON object")
    tag.pop(MADE_OF, None)
    if "structures" not in tag:
        return tag
    try:
        tags = [
            {
                "type": "tag",
                "begin": s["begin"],
                "content": {"type": "json_schema", "json_schema": s["schema"]},
                "end": s["end"],
            }
            for s in tag["structures"]
        ]
        triggers = tag["triggers"]
    except KeyError as error:
        raise ValueError(f"missing key {error}") from None
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
