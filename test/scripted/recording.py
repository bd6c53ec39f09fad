"""What agents sent, as small files: the form of their requests with the words of others taken out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"
PROJECT = "/home/user/project"
LONG = 64
"""Characters of a text that stays."""
_OF_A_SESSION = frozenset(("metadata", "client_metadata", "prompt_cache_key"))
_HEADERS = ("anthropic-version", "anthropic-beta", "user-agent", "x-codex-beta-features")


def trimmed(value: Any, folder: str, kept: Sequence[str]) -> Any:
    """`value` with a length in place of each long text, and without descriptions. `folder`: the agent's, which gets
    another name. Texts with one of the `kept` in them stay."""
    if isinstance(value, dict):
        fields = {
            name: entry for name, entry in value.items() if not (name == "description" and isinstance(entry, str))
        }
        return {
            name: {} if name in _OF_A_SESSION and isinstance(entry, dict) else trimmed(entry, folder, kept)
            for name, entry in fields.items()
        }
    if isinstance(value, list):
        return [trimmed(entry, folder, kept) for entry in value]
    if not isinstance(value, str):
        return value
    text = value.replace(folder, PROJECT)
    own = len(text) <= LONG or any(mark in text and len(text) <= 4 * LONG for mark in kept)
    return text if own else f"A text of {len(text)} characters."


def record(name: str, requests: Sequence[dict[str, Any]], folder: str, kept: Sequence[str]) -> None:
    """Writes the first and the last request of a session, which has all that was said."""
    chosen = [requests[0], requests[-1]]
    entries = [
        {
            "path": request["path"],
            "headers": {key: value.split(" ")[0] for key, value in request["headers"].items() if key in _HEADERS},
            "body": trimmed(request["body"], folder, kept),
        }
        for request in chosen
    ]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def recorded(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return entries
