"""Detects the output formats of a model from its chat template: `--tool-call-parser auto`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]
"""(messages, tools, whether the answer's beginning follows) -> text. Raises ValueError if the template refuses."""

_NAME, _ARGUMENTS = "probe_function", {"key": "probe_value"}
_CALL_IDS = ("probe0001", f"functions.{_NAME}:0")
"""Some templates want nine characters; others write the id in place of the name."""
_USER = {"role": "user", "content": "probe question"}
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "probe", "parameters": _SCHEMA}}]

_BY_ARCHITECTURE: Mapping[str, tuple[str, str | None]] = {
    "GptOssForCausalLM": ("gpt-oss", "gpt-oss"),
    "HYV4ForCausalLM": ("hy_v4", "hy_v4"),
    "HYV4VLForConditionalGeneration": ("hy_v4", "hy_v4"),
    "InklingForConditionalGeneration": ("inkling", "inkling"),
    "MuseGlimmerForConditionalGeneration": ("muse", "muse"),
    "MuseSparkForConditionalGeneration": ("muse", "muse"),
}
"""Models whose conversations are not written with a template or not with their own, or whose tags have a suffix."""

_REASONING_OF_CALLS = {
    "deepseekv32": "deepseek-v3",
    "deepseekv4": "deepseek-v4",
    "deepseekv41": "deepseek-v4",
    "glm45": "glm45",
    "glm47": "glm45",
    "hunyuan": "hunyuan",
    "kimi_k2": "kimi_k2",
    "minimax-m2": "minimax",
}
"""Formats whose thoughts have a rule of their own, by the format of their calls."""
_THINK = "qwen3"


def tool_call_format(architecture: str, render: Render) -> str | None:
    """Returns the name of the format that reads a call rendered by the template and leaves least of it as text; None if
    there is none."""
    if architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture][0]
    return next((name for call_id in _CALL_IDS if (name := _format_of_call(call_id, render)) is not None), None)


def _format_of_call(call_id: str, render: Render) -> str | None:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        whole = render([_USER, answer], _TOOLS, False)
        before = render([_USER], _TOOLS, False)
        prompt = render([_USER], _TOOLS, True)
    except ValueError:
        return None
    outputs = [whole[_common_length(whole, text) :] for text in (before, prompt)]
    leftovers: dict[str, int] = {}
    for name, form in TOOL_CALL_FORMATS.items():
        for output in outputs:
            result = parse(OutputParser(calls=form, tools={_NAME: _SCHEMA}), output)
            if [call.name for call in result.calls] == [_NAME] and "probe_value" in result.calls[0].arguments:
                leftovers[name] = min(len(result.text), leftovers.get(name, len(whole)))
    if "glm45" in leftovers and f"<tool_call>{_NAME}\n" not in whole:
        del leftovers["glm45"]
    if "mimo" in leftovers and f"<tool_call><function={_NAME}>" not in whole:
        del leftovers["mimo"]
    return min(leftovers, key=lambda name: leftovers[name]) if leftovers else None


def _common_length(text: str, other: str) -> int:
    """Returns the number of leading characters that both have in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))


def reasoning_format(architecture: str, template: str, calls: str | None) -> str | None:
    """Returns the name of the format whose marks occur in the template's source. calls: the model's format of calls."""
    if architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture][1]
    for name in ("apertus2509", "gemma4", "gpt-oss", "hunyuan-opensource", "inkling", "kimi", "minimax-m3", "mistral"):
        if all(mark in template for mark in REASONING_FORMATS[name].markers[:2]):
            return name
    if REASONING_FORMATS[_THINK].markers[1] not in template:
        return None
    return _REASONING_OF_CALLS.get(calls or "", _THINK)
