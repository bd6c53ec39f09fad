"""What models write, in the formats of the templates that scripted servers have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from scripted.server import TEMPLATES


class Served(NamedTuple):
    """A kind of chat template, and the format of calls that goes with it."""

    template: str | None
    parser: str

    @property
    def flags(self) -> tuple[str, ...]:
        template = () if self.template is None else ("--chat-template", str(TEMPLATES / f"{self.template}.jinja"))
        return ("--tool-call-parser", self.parser, *template)

    def call(self, name: str, **arguments: Any) -> str:
        return _CALLS[self.parser](name, arguments)


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _qwen3_coder(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def _gemma4(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<|tool_call>call:{name}{_gemma4_value(arguments)}<tool_call|>"


def _gemma4_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_gemma4_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma4_value, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_CALLS = {"hermes": _hermes, "qwen3_coder": _qwen3_coder, "mistral": _mistral, "gemma4": _gemma4}
SERVED = {
    "embedded": Served(None, "hermes"),
    "system_first": Served("system_first", "qwen3_coder"),
    "alternating": Served("alternating", "mistral"),
    "no_system": Served("no_system", "gemma4"),
}
