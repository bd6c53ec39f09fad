"""Output formats by the names that `--tool-call-parser` and `--reasoning-parser` take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.harmony import HARMONY
from sglang.srt.function_call.inkling import INKLING
from sglang.srt.function_call.json_calls import (
    NamedArguments,
    array_or_named,
    bare_call_objects,
    call_objects,
    calls_by_key,
    calls_in_brackets,
)
from sglang.srt.function_call.keyed_text import keyed_calls
from sglang.srt.function_call.llama4_calls import llama4_calls
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.muse import MUSE
from sglang.srt.function_call.nested_tags import TAG, nested_tags
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.tagged_calls import TaggedCalls

_NAME = r"\s*([^\s<>]+)\s*"

_HERMES = CallFormat(begin=("<tool_call>",), grammar=call_objects("</tool_call>"))


def _glm(tag: str) -> CallFormat:
    return CallFormat(
        begin=(f"<{tag}>",),
        grammar=TaggedCalls(
            key="<arg_key>",
            after_key={"</arg_key>": None},
            value="<arg_value>",
            after_value="</arg_value>",
            end=f"</{tag}>",
            next_tags=(f"<{tag}>",),
        ),
    )


def _hunyuan(suffix: str = "", after_name: str = "<tool_sep>") -> CallFormat:
    """Returns Hunyuan's format. `suffix`: the end of every tag's name."""
    return CallFormat(
        sections=((f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),),
        begin=(f"<tool_call{suffix}>",),
        grammar=TaggedCalls(
            after_name=after_name,
            key=f"<arg_key{suffix}>",
            after_key={f"</arg_key{suffix}>": None},
            value=f"<arg_value{suffix}>",
            after_value=f"</arg_value{suffix}>",
            end=f"</tool_call{suffix}>",
            next_tags=(f"<tool_call{suffix}>", f"</tool_calls{suffix}>"),
        ),
    )


_KIMI_K2 = CallFormat(
    sections=tuple(
        (f"<|{calls}_section_begin|>", f"<|{calls}_section_end|>")
        for calls in ("tool_calls", "tool_call")  # the model sometimes writes the second one
    ),
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
        sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),), begin=("<｜tool▁call▁begin｜>",), grammar=named
    )


_DEEPSEEK_V3 = _deepseek(
    NamedArguments(
        name=rf"\s*function<｜tool▁sep｜>{_NAME}", arguments="```json", after="```", end="<｜tool▁call▁end｜>"
    )
)
_DEEPSEEK_V31 = _deepseek(NamedArguments(name=_NAME, arguments="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"))


def _dsml(section: str, mark: str = "｜DSML｜") -> CallFormat:
    """Returns DeepSeek's DSML format. `mark` stands before the name of every tag."""
    return CallFormat(
        sections=((f"<{mark}{section}>", f"</{mark}{section}>"),),
        begin=(f'<{mark}invoke name="',),
        grammar=TaggedCalls(
            after_name='">',
            closing=('"/>', '" />'),
            json_body=True,
            key=f'<{mark}parameter name="',
            after_key={'" string="true">': True, '" string="false">': False},
            after_value=f"</{mark}parameter>",
            end=f"</{mark}invoke>",
            next_tags=(f'<{mark}invoke name="', f"</{mark}{section}>"),
            no_value=(f'<{mark}parameter name="', f"</{mark}invoke>", f'<{mark}invoke name="'),
        ),
    )


_QWEN3_CODER = CallFormat(
    sections=(("<tool_call>", "</tool_call>"),),
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


_MIMO = CallFormat(
    sections=(("<tool_call>", "</tool_call>"),),
    begin=("<function=",),
    grammar=TaggedCalls(
        after_name=">",
        key="<parameter=",
        after_key={">": None},
        after_value="</parameter>",
        end="</function>",
        escapes=True,
        next_tags=("<tool_call>", "</tool_call>", "<function="),
    ),
)


def _invoke(section: str) -> CallFormat:
    return CallFormat(
        sections=((f"<{section}>", f"</{section}>"),),
        begin=('<invoke name="',),
        grammar=TaggedCalls(
            after_name='">',
            key='<parameter name="',
            after_key={'">': None},
            after_value="</parameter>",
            end="</invoke>",
            next_tags=('<invoke name="', f"</{section}>"),
        ),
    )


_MINIMAX_M3 = CallFormat(
    sections=((f"{TAG}<tool_call>", f"{TAG}</tool_call>"),), begin=(f'{TAG}<invoke name="',), grammar=nested_tags
)

_MINICPM5 = CallFormat(
    begin=('<function name="',),
    grammar=TaggedCalls(
        after_name='">',
        closing=('"/>', '" />'),
        key='<param name="',
        after_key={'">': None},
        after_value="</param>",
        cdata=("<![CDATA[", "]]>"),
        end="</function>",
        next_tags=('<function name="',),
    ),
)

_STEP3_BEGIN = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
_STEP3 = CallFormat(
    sections=(("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),),
    begin=(_STEP3_BEGIN,),
    grammar=TaggedCalls(
        after_name='">',
        key='<steptml:parameter name="',
        after_key={'">': None},
        after_value="</steptml:parameter>",
        end="</steptml:invoke>",
        after_end="<｜tool_call_end｜>",
        next_tags=("<｜tool_call_end｜>", _STEP3_BEGIN, "<｜tool_calls_end｜>"),
    ),
)

_GIGACHAT3 = CallFormat(
    begin=(
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "function call<|role_sep|>\n",
        "<|function_call|>",
    ),
    grammar=call_objects("<|message_sep|>"),
)

_MISTRAL = CallFormat(
    begin=("[TOOL_CALLS]",),
    grammar=array_or_named(NamedArguments(name=r"\s*([^\s\[\]]+?)\s*(?:\[CALL_ID\].*)?", arguments="[ARGS]")),
)

_CALLS: Mapping[str, CallFormat | MessageFormat] = {
    "apertus2509": CallFormat(begin=("<|tools_prefix|>",), grammar=calls_by_key("<|tools_suffix|>")),
    "deepseekv3": _DEEPSEEK_V3,
    "deepseekv31": _DEEPSEEK_V31,
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", "｜DSML｜ "),
    "dots": _invoke("dots_function_call"),
    "gemma4": CallFormat(begin=("<|tool_call>",), bare="c", grammar=keyed_calls),
    "gigachat3": _GIGACHAT3,
    "gigachat35": _dsml("tool_calls", "｜GCML｜"),
    "glm45": _glm("tool_call"),
    "glm47": _glm("tool_call"),
    "gpt-oss": HARMONY,
    "hermes": _HERMES,
    "hunyuan": _hunyuan(),
    "hunyuan-opensource": _hunyuan(":opensource", "<tool_sep:opensource>"),
    "hy_v4": _hunyuan(after_name=""),
    "inkling": INKLING,
    "interns1": CallFormat(
        begin=("<|action_start|> <|plugin|>", "<|action_start|><|plugin|>"), grammar=call_objects("<|action_end|>")
    ),
    "iquest_q1": _glm("iquest_tool_call"),
    "kimi_k2": _KIMI_K2,
    "lfm2": CallFormat(begin=("<|tool_call_start|>",), grammar=calls_in_brackets("<|tool_call_end|>")),
    "llama3": CallFormat(begin=("<|python_tag|>",), bare="{", grammar=bare_call_objects),
    "mimo": _MIMO,
    "minicpm5": _MINICPM5,
    "minimax-m2": _invoke("minimax:tool_call"),
    "minimax-m3": _MINIMAX_M3,
    "mistral": _MISTRAL,
    "muse": MUSE,
    "pythonic": CallFormat(begin=("<|python_start|>",), bare="[{", grammar=llama4_calls),
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "step3": _STEP3,
}
NUMBERED_IDS = frozenset(("kimi_k2",))
"""Formats whose models know calls as `functions.{name}:{number}`, counted over the conversation."""
SHORT_ID = 9
SHORT_IDS = frozenset(("mistral",))
"""Formats whose templates refuse ids of any other length."""


def _think(suffix: str) -> ReasoningFormat:
    return ReasoningFormat(begin=f"<think{suffix}>", end=f"</think{suffix}>")


_THINK = ReasoningFormat()
_THINK_INSIDE = ReasoningFormat(inside=True)

_REASONING: Mapping[str, ReasoningFormat | MessageFormat] = {
    "apertus2509": ReasoningFormat(begin="<|inner_prefix|>", end="<|inner_suffix|>"),
    "deepseek-r1": _THINK_INSIDE,
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "gemma4": ReasoningFormat(begin="<|channel>thought", end="<channel|>"),
    "glm45": _THINK,
    "gpt-oss": HARMONY,
    "hunyuan": _THINK,
    "hunyuan-opensource": _think(":opensource"),
    "hy_v4": _THINK,
    "inkling": INKLING,
    "kimi": ReasoningFormat(begin="◁think▷", end="◁/think▷"),
    "kimi_k2": _THINK,
    "minimax": _THINK_INSIDE,
    "minimax-append-think": ReasoningFormat(inside=True, in_text=True),
    "minimax-m3": ReasoningFormat(begin="<mm:think>", end="</mm:think>", lone_end=True),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    "muse": MUSE,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_INSIDE,
}


_Form = TypeVar("_Form")


class _Formats(dict[str, _Form]):
    """Formats by name. "NAME:SUFFIX", for NAME in `suffixed`, is that format with ":SUFFIX" behind every tag's name."""

    def __init__(self, formats: Mapping[str, _Form], suffixed: Mapping[str, Callable[[str], _Form]]) -> None:
        super().__init__(formats)
        self._suffixed, self._made = suffixed, dict[str, _Form]()

    def __missing__(self, name: str) -> _Form:
        base, colon, suffix = name.partition(":")
        if not suffix or base not in self._suffixed:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._suffixed[base](colon + suffix)
        return self._made[name]


TOOL_CALL_FORMATS: Mapping[str, CallFormat | MessageFormat] = _Formats(
    _CALLS, {"hy_v4": lambda suffix: _hunyuan(suffix, "")}
)
REASONING_FORMATS: Mapping[str, ReasoningFormat | MessageFormat] = _Formats(_REASONING, {"hy_v4": _think})

SUFFIXED = frozenset(("hy_v4",))
"""Formats of which each checkpoint has tags with a suffix of its own, which its tokenizer tells."""
_SUFFIXED_TAG = re.compile(r"<(?:think|tool_calls|tool_call|arg_key|arg_value)(:[^\s>]+)>")


def tag_suffix(tokens: Iterable[str]) -> str:
    """Returns what stands behind the names of tags among these tokens, with its colon; "": nothing."""
    return next((tag[1] for token in tokens if (tag := _SUFFIXED_TAG.fullmatch(token))), "")


OTHER_TAGS: Mapping[str, tuple[str, str]] = {"hunyuan": ("hunyuan-opensource", "<tool_calls:opensource>")}
"""Formats whose tags newer tokenizers spell otherwise: the format with these tags, and one that such a tokenizer has as
a token. Hy3-preview has the plain ones."""
