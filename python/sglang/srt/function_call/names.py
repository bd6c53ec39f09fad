"""Which names of functions a format's calls can have: those that its parser reads from a call as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sglang.srt.function_call.forcing import FORCED_CALLS
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.output import MAX_HEADER
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import TOOL_CALL_FORMATS
from sglang.srt.function_call.tagged_arguments import NAME

_NOT_FORCED: Mapping[str, str] = {
    "gemma4": f"<|tool_call>call:{NAME}{{}}<tool_call|>",
    "gigachat35": f'<｜GCML｜invoke name="{NAME}">\n</｜GCML｜invoke>',
    "hunyuan-opensource": f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n</tool_call:opensource>",
    "lfm2": f"<|tool_call_start|>[{NAME}()]<|tool_call_end|>",
    "minicpm5": f'<function name="{NAME}"></function>',
    "pythonic": f"<|python_start|>[{NAME}()]<|python_end|>",
}
"""A call without arguments, for the formats whose calls are not forced."""

_PLAIN = re.compile(r"(?!(?:self|user)\Z)[\w.:/-]{1,256}", re.ASCII)
"""Names that every format has a form for, so that a request with thousands of them costs nothing. The two words are
recipients of Muse-Glimmer's messages."""


def unwritable(calls_name: str, names: Iterable[str]) -> str | None:
    """Returns the first name that a call in this format cannot have; None if there is none. Names longer than
    MAX_HEADER are none in any format."""
    return next((name for name in names if not (_PLAIN.fullmatch(name) or _is_read(calls_name, name))), None)


def _is_read(calls_name: str, name: str) -> bool:
    if len(name) > MAX_HEADER:
        return False
    form = TOOL_CALL_FORMATS[calls_name]
    reasoning = form if isinstance(form, MessageFormat) else None
    output = parse(OutputParser(calls=form, tools={name: {}}, reasoning=reasoning), _call(calls_name, name))
    return [call.name for call in output.calls] == [name] and not output.text


def _call(calls_name: str, name: str) -> str:
    forced = FORCED_CALLS.get(calls_name)
    return _NOT_FORCED[calls_name].replace(NAME, name) if forced is None else forced.without_arguments(name)
