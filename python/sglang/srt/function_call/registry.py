"""The formats by the names that `--tool-call-parser` and `--reasoning-parser` take."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.harmony import HARMONY, Harmony
from sglang.srt.function_call.json_calls import NamedArguments, array_or_named, bare_call_objects, call_objects
from sglang.srt.function_call.pythonic import pythonic_calls
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.tagged_calls import TaggedCalls

_NAME = r"\s*([^\s<>]+)\s*"

_HERMES = CallFormat(begin=("<tool_call>",), grammar=call_objects("</tool_call>"))

_GLM = CallFormat(
    begin=("<tool_call>",),
    grammar=TaggedCalls(
        key="<arg_key>",
        after_key={"</arg_key>": None},
        value="<arg_value>",
        after_value="</arg_value>",
        end="</tool_call>",
    ),
)

_KIMI_K2 = CallFormat(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin=("<|tool_call_begin|>",),
    grammar=NamedArguments(
        name=r"\s*(?:functions\.)?([^\s<>]+?)(?::\d+)?\s*",
        arguments="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        counted=True,
    ),
)


def _deepseek(named: NamedArguments) -> CallFormat:
    return CallFormat(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), begin=("<｜tool▁call▁begin｜>",), grammar=named
    )


_DEEPSEEK_V3 = _deepseek(
    NamedArguments(
        name=rf"\s*function<｜tool▁sep｜>{_NAME}", arguments="```json", after="```", end="<｜tool▁call▁end｜>"
    )
)
_DEEPSEEK_V31 = _deepseek(NamedArguments(name=_NAME, arguments="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"))


def _dsml(section: str) -> CallFormat:
    return CallFormat(
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        begin=('<｜DSML｜invoke name="',),
        grammar=TaggedCalls(
            after_name='">',
            closing=('"/>', '" />'),
            json_body=True,
            key='<｜DSML｜parameter name="',
            after_key={'" string="true">': True, '" string="false">': False},
            after_value="</｜DSML｜parameter>",
            end="</｜DSML｜invoke>",
        ),
    )


_QWEN3_CODER = CallFormat(
    section=("<tool_call>", "</tool_call>"),
    begin=("<function=",),
    grammar=TaggedCalls(
        after_name=">",
        key="<parameter=",
        after_key={">": None},
        after_value="</parameter>",
        end="</function>",
        lines=True,
        next_tags=("<tool_call>", "</tool_call>", "<function="),
        no_end=(
            (
                "\n<parameter=",
                "\n</function>",
                "\n</tool_call>",
                "</function>\n</tool_call>",
                "</function></tool_call>",
            ),
            ("<parameter=", "</function>", "</tool_call>"),
        ),
    ),
)

_MINIMAX_M2 = CallFormat(
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    begin=('<invoke name="',),
    grammar=TaggedCalls(
        after_name='">',
        key='<parameter name="',
        after_key={'">': None},
        after_value="</parameter>",
        end="</invoke>",
    ),
)

_MISTRAL = CallFormat(
    begin=("[TOOL_CALLS]",),
    grammar=array_or_named(NamedArguments(name=r"\s*([^\s\[\]]+?)\s*(?:\[CALL_ID\].*)?", arguments="[ARGS]")),
)

TOOL_CALL_FORMATS: Mapping[str, CallFormat | Harmony] = {
    "deepseekv3": _DEEPSEEK_V3,
    "deepseekv31": _DEEPSEEK_V31,
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "glm45": _GLM,
    "glm47": _GLM,
    "gpt-oss": HARMONY,
    "hermes": _HERMES,
    "kimi_k2": _KIMI_K2,
    "llama3": CallFormat(begin=("<|python_tag|>",), bare="{", grammar=bare_call_objects),
    "minimax-m2": _MINIMAX_M2,
    "mistral": _MISTRAL,
    "pythonic": CallFormat(begin=("<|python_start|>",), bare="[", grammar=pythonic_calls),
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
}
NUMBERED_IDS = frozenset(("kimi_k2",))
"""Formats whose models know calls as `functions.{name}:{number}`, counted over the conversation."""
SHORT_ID = 9
SHORT_IDS = frozenset(("mistral",))
"""Formats whose templates refuse ids of any other length."""

_THINK = ReasoningFormat()
_THINK_OR_CALL = ReasoningFormat(calls_end=True)
_THINK_INSIDE = ReasoningFormat(inside=True)

REASONING_FORMATS: Mapping[str, ReasoningFormat | Harmony] = {
    "deepseek-r1": _THINK_INSIDE,
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "glm45": _THINK_OR_CALL,
    "gpt-oss": HARMONY,
    "kimi": ReasoningFormat(begin="◁think▷", end="◁/think▷"),
    "kimi_k2": _THINK_OR_CALL,
    "minimax": _THINK_INSIDE,
    "minimax-append-think": ReasoningFormat(inside=True, in_text=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    "qwen3": _THINK_OR_CALL,
    "qwen3-thinking": ReasoningFormat(inside=True, calls_end=True),
}
