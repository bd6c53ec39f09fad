"""Names of functions and arguments that a format's calls can have: those that its parser reads back from a written
call."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang.srt.function_call.forcing import FORCED_CALLS
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.output import MAX_HEADER
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import TOOL_CALL_FORMATS
from sglang.srt.function_call.schema_types import referenced
from sglang.srt.function_call.tagged_arguments import NAME

_NOT_FORCED: Mapping[str, str] = {
    "gemma4": f"<|tool_call>call:{NAME}{{}}<tool_call|>",
    "gigachat35": f'<｜GCML｜invoke name="{NAME}">\n</｜GCML｜invoke>',
    "hunyuan-opensource": f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n</tool_call:opensource>",
    "hy_v4": f"<tool_callSUFFIX>{NAME}</tool_callSUFFIX>",
    "lfm2": f"<|tool_call_start|>[{NAME}()]<|tool_call_end|>",
    "minicpm5": f'<function name="{NAME}"></function>',
    "pythonic": f"<|python_start|>[{NAME}()]<|python_end|>",
}
"""A call without arguments, for the formats whose calls are not forced."""

SURE_LENGTH = 256
"""Characters that a name may have in every format."""
MAX_TRIED = 64
"""Unusual names of one request that are tried, those of the same shape as one: each takes up to some milliseconds."""
_SAFE = r"[A-Za-z0-9_.:/-]|[^\x00-\x7f\s｜▁]"
"""Characters that are no syntax in any format, alone or in a row."""
_SAFE_RUN = re.compile(f"(?:{_SAFE})+")
_PLAIN = re.compile(rf"(?!/|(?:self|user)\Z)(?:{_SAFE}){{1,{SURE_LENGTH}}}")
"""Names that are not tried: every format has a form for them. A slash in front ends tags of MiniMax-M3, the words are
recipients of Muse-Glimmer's messages."""
_SYNTAX = re.compile("[<>=`/]|self|user")
"""What may be syntax together with safe characters."""
_JOINED = ("allOf", "anyOf", "oneOf")


def check_function_names(calls_name: str, names: Iterable[str]) -> None:
    """Raises ValueError for names that calls in this format cannot have."""
    forced = FORCED_CALLS.get(calls_name)
    if forced is None or not forced.escapes_names:
        _check("function name", calls_name, names, _reads_function)


def check_argument_names(calls_name: str, names: Iterable[str]) -> None:
    """Raises ValueError for names (from `tagged_names`) that arguments in this format cannot have."""
    _check("parameter", calls_name, names, _reads_argument)


def _check(what: str, calls_name: str, names: Iterable[str], is_read: Callable[[str, str], bool]) -> None:
    tried: set[str] = set()
    for name in names:
        if _PLAIN.fullmatch(name):
            continue
        shape = name if len(name) > SURE_LENGTH or _SYNTAX.search(name) else _SAFE_RUN.sub("x", name)
        tried.add(shape)
        if len(tried) > MAX_TRIED:
            raise ValueError(
                f"more than {MAX_TRIED} names of functions or parameters have unusual characters. {_REMEDY}"
            )
        if len(name) > MAX_HEADER or not is_read(calls_name, shape):
            raise ValueError(
                f"the {what} {name[:64]!r} cannot be written in calls like {calls_name}'s:"
                f" it would be read as something else. {_REMEDY}"
            )


_REMEDY = f"Give it another name, of up to {SURE_LENGTH} letters, digits and _ . : / -"


@functools.lru_cache(maxsize=1024)
def _reads_function(calls_name: str, name: str) -> bool:
    return _is_read(calls_name, name, ())


@functools.lru_cache(maxsize=1024)
def _reads_argument(calls_name: str, name: str) -> bool:
    return _is_read(calls_name, "f", (name,))


def tagged_names(calls_name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names in a function's schema that calls in this format write as tags: none for JSON; for nested tags
    also the names in nested objects."""
    forced = FORCED_CALLS.get(calls_name)
    if forced is None or not forced.has_tags:
        return
    pending: list[Any] = [schema]
    seen: set[int] = set()
    while pending:
        entry = pending.pop()
        if not isinstance(entry, dict) or id(entry) in seen:
            continue
        seen.add(id(entry))
        properties = entry.get("properties")
        if isinstance(properties, dict):
            yield from properties
            pending += properties.values() if forced.has_nested_tags else ()
        if forced.has_nested_tags:
            pending.append(entry.get("items"))
        if isinstance(entry.get("$ref"), str):
            pending.append(referenced(entry["$ref"], schema))
        for word in _JOINED:
            pending += entry[word] if isinstance(entry.get(word), list) else ()


def _is_read(calls_name: str, name: str, arguments: Sequence[str]) -> bool:
    """Returns whether the parser reads back a written call of this function with arguments of these names."""
    form, forced = TOOL_CALL_FORMATS[calls_name], FORCED_CALLS.get(calls_name)
    tools = {name: {"properties": {argument: {"type": "string"} for argument in arguments}}}
    base, colon, suffix = calls_name.partition(":")  # of tags
    plain = _NOT_FORCED.get(base, "").replace("SUFFIX", colon + suffix)
    text = plain.replace(NAME, name) if forced is None else forced.written(name, arguments)
    reasoning = form if isinstance(form, MessageFormat) else None
    output = parse(OutputParser(calls=form, tools=tools, reasoning=reasoning), text)
    calls = [(call.name, list(json.loads(call.arguments))) for call in output.calls]
    return not output.text and calls == [(name, list(arguments))]
