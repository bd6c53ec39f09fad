"""Refuses request fields whose meaning this server lacks, by name, because ignoring them would change the answer.

Names that no API defines are ignored. So is a value that asks for nothing (null, false, empty, or a field's default).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.upstream_interface import Unsupported, unsupported_fields

_MAX_NEUTRAL_BYTES = 256
"""A longer value counts as asking for something."""


NATIVE = unsupported_fields("native")
COMPLETIONS = unsupported_fields("completions")
CHAT = unsupported_fields("chat")
MESSAGES = unsupported_fields("messages")
RESPONSES = unsupported_fields("responses")
EMBEDDINGS = unsupported_fields("embeddings")
OLLAMA = unsupported_fields("ollama")
OLLAMA_OPTIONS = unsupported_fields("ollama options")
PROFILE = unsupported_fields("profile")


def refuse_unsupported(raw: bytes, table: Mapping[str, Unsupported]) -> None:
    """Raises ApiError 400 for the first field of the JSON object `raw` that is in `table` and asks for something."""
    values = _decoder(tuple(table)).decode(raw)
    for name, field in table.items():
        text = bytes(getattr(values, name))
        if text != _ABSENT and not _is_neutral(text, field):
            raise bad_request(f"{name} is not supported: {field.reason}.", param=name)


_ABSENT = b"null"


@functools.cache
def _decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Returns a decoder that keeps the raw values of these fields and skips all others."""
    fields = [(name, msgspec.Raw, msgspec.Raw(_ABSENT)) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("UnsupportedFields", fields))


def _is_neutral(text: bytes, field: Unsupported) -> bool:
    if len(text) > _MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(text)
    return _is_empty(value) or any(value == neutral and type(value) is type(neutral) for neutral in field.neutral)


def _is_empty(value: Any) -> bool:
    """Returns whether a value is null, false, "", or a list of only these."""
    if isinstance(value, list):
        return all(_is_empty(entry) for entry in value)
    return value is None or value is False or value == "" or value == {}
