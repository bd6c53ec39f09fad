"""Output formats of the served model: calls and thoughts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.registry import NUMBERED_IDS, REASONING_FORMATS, SHORT_ID, SHORT_IDS, TOOL_CALL_FORMATS


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Names from `--tool-call-parser` and `--reasoning-parser`, `auto` resolved; None: not parsed.

    `hidden_markers`: the tokenizer has markers as special tokens, which are seen only if those are not skipped.
    """

    calls_name: str | None = None
    reasoning_name: str | None = None
    hidden_markers: bool = False

    @property
    def calls(self) -> CallFormat | MessageFormat | None:
        """Returns the format of the model's calls; None if it has none."""
        return None if self.calls_name is None else TOOL_CALL_FORMATS[self.calls_name]

    @property
    def reasoning(self) -> ReasoningFormat | MessageFormat | None:
        """Returns the format of the model's thoughts; None if it has none."""
        return None if self.reasoning_name is None else REASONING_FORMATS[self.reasoning_name]

    def counted_id(self, name: str, number: int) -> str:
        """Returns an id in the format's form for call `number` of a conversation."""
        return f"functions.{name}:{number}" if self.calls_name in NUMBERED_IDS else f"call{number:0{SHORT_ID - 4}}"

    def has_id(self, call_id: Any, name: str, number: int) -> bool:
        """Returns whether the call `number` of a conversation may have this id in the model's format."""
        if self.calls_name in NUMBERED_IDS:
            return bool(call_id == self.counted_id(name, number))
        if self.calls_name in SHORT_IDS:
            return isinstance(call_id, str) and re.fullmatch(rf"[A-Za-z0-9]{{{SHORT_ID}}}", call_id) is not None
        return True

    @property
    def messages(self) -> MessageFormat | None:
        """Returns the format of the messages that an output consists of; None if it is plain text."""
        return next((form for form in (self.calls, self.reasoning) if isinstance(form, MessageFormat)), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the texts that the parser must see, also those that are special tokens."""
        return tuple(mark for form in (self.calls, self.reasoning) if form is not None for mark in form.markers)


def has_hidden(markers: tuple[str, ...], shown: Callable[[str], str]) -> bool:
    """Returns whether a detokenizer that skips special tokens removes one of the markers."""
    return any(marker not in shown(marker) for marker in markers)


def tool_schemas(tools: list[dict[str, Any]] | None) -> Mapping[str, Mapping[str, Any]]:
    """Returns the schema of the parameters by name, for the functions of a request."""
    functions = [tool["function"] for tool in tools or ()]
    return {function["name"]: function.get("parameters") or {} for function in functions}
