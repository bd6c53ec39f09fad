"""Grammars that make a model write calls in its own format: structural tags, as xgrammar defines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.grammar import MAX_WHITESPACE
from sglang.srt.function_call.harmony import CHANNEL, CONSTRAIN, MESSAGE
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.tagged_arguments import NAME, tagged_arguments, verify_count

Format = dict[str, Any]
"""A part of a structural tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCalls:
    """`begin` and `end` stand around a call's arguments, `begin` with NAME for the function's name; `number`: a number
    and this text follow it. `style`: how the arguments are written. `section` stands around a row of calls, `between`
    between them. `single`: nothing follows a call. `header`: stands before `begin` where nothing but calls is allowed;
    elsewhere it is part of the text. `values`: what stands around an argument, NAME for its name, where each is tagged.
    """

    begin: str
    header: str = ""
    number: str = ""
    style: str = "json"
    values: tuple[str, str] | None = None
    end: str
    section: tuple[str, str] | None = None
    between: str = ""
    single: bool = False

    def at_least_one(self, tools: Mapping[str, Format], one: bool) -> Format:
        """Calls and nothing else. tools: name -> schema of the arguments. one: exactly one call."""
        row = {
            "type": "tags_with_separator",
            "tags": self._tags(tools, self.header),
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": one or self.single,
        }
        return self._section(row) if self.section is not None else row

    def among_text(self, tools: Mapping[str, Format], one: bool) -> Format:
        """Any text; a call that begins in it is a call of one of the tools."""
        if self.section is not None:
            tags, trigger = [self.at_least_one(tools, one)], self.section[0]
        else:
            tags, trigger = self._tags(tools), self.begin.partition(NAME)[0]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": one or self.single}

    def _tags(self, tools: Mapping[str, Format], header: str = "") -> list[Format]:
        if self.values is not None:
            verify_count(tools.values())
        begin = header + self.begin
        return [_tag(begin.replace(NAME, name), self._content(schema), self.end) for name, schema in tools.items()]

    def _content(self, schema: Format) -> Format:
        if self.values is not None:
            return tagged_arguments(schema, *self.values)
        arguments = {**_json(schema), "style": self.style}
        if not self.number:
            return arguments
        return _sequence({"type": "regex", "pattern": "[0-9]{1,6}"}, _constant(self.number), arguments)

    def _section(self, row: Format) -> Format:
        assert self.section is not None
        return _tag(self.section[0], row, self.section[1])


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


_HERMES = ForcedCalls(begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>", between="\n")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _dsml(section: str, mark: str = "｜DSML｜", style: str = "deepseek_xml") -> ForcedCalls:
    return ForcedCalls(
        begin=f'<{mark}invoke name="NAME">\n',
        style=style,
        end=f"</{mark}invoke>\n",
        section=(f"<{mark}{section}>\n", f"</{mark}{section}>"),
    )


def _invoke(section: str, tag: str = "", style: str = "minimax_xml") -> ForcedCalls:
    """`tag` stands in front of every tag."""
    return ForcedCalls(
        begin=f'{tag}<invoke name="NAME">' + ("" if tag else "\n"),
        style=style,
        end=f"{tag}</invoke>\n",
        section=(f"{tag}<{section}>\n", f"{tag}</{section}>"),
    )


FORCED_CALLS: Mapping[str, ForcedCalls] = {
    "apertus2509": ForcedCalls(
        begin='{"NAME": ', end="}", section=("<|tools_prefix|>[", "]<|tools_suffix|>"), between=", "
    ),
    "deepseekv3": ForcedCalls(
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        section=_DEEPSEEK,
        between="\n",
    ),
    "deepseekv31": ForcedCalls(
        begin="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", end="<｜tool▁call▁end｜>", section=_DEEPSEEK
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", "｜DSML｜ ", "deepseek_v4_1_xml"),
    "dots": _invoke("dots_function_call"),
    "gigachat3": ForcedCalls(begin='<|function_call|>{"name": "NAME", "arguments": ', end="}"),
    "glm45": ForcedCalls(begin="<tool_call>NAME\n", style="glm_xml", end="</tool_call>", between="\n"),
    "glm47": ForcedCalls(begin="<tool_call>NAME", style="glm_xml", end="</tool_call>"),
    "gpt-oss": ForcedCalls(
        begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", end="", single=True
    ),
    "hermes": _HERMES,
    "hunyuan": ForcedCalls(
        begin="<tool_call>NAME<tool_sep>\n",
        style="glm_xml",
        end="</tool_call>\n",
        section=("<tool_calls>\n", "</tool_calls>"),
    ),
    "inkling": ForcedCalls(
        header="NAME",
        begin='<|content_invoke_tool_json|>{"name":"NAME","args":',
        end="}<|end_message|>",
        between="<|message_model|>",
    ),
    "interns1": ForcedCalls(
        begin='<|action_start|> <|plugin|>\n{"name": "NAME", "parameters": ', end="}<|action_end|>"
    ),
    "iquest_q1": ForcedCalls(begin="<iquest_tool_call>NAME", style="glm_xml", end="</iquest_tool_call>"),
    "kimi_k2": ForcedCalls(
        begin="<|tool_call_begin|>functions.NAME:",
        number="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "llama3": ForcedCalls(begin='{"name": "NAME", "parameters": ', end="}", between="; "),
    "minimax-m2": _invoke("minimax:tool_call"),
    "minimax-m3": _invoke("tool_call", "]<]minimax[>[", "minimax_m3_xml"),
    "mistral": ForcedCalls(begin="[TOOL_CALLS]NAME[ARGS]", end=""),
    "muse": ForcedCalls(
        header=" to=NAME",
        begin=f'{MESSAGE}<atem:function_calls>\n<atem:invoke name="NAME">\n',
        values=('<atem:parameter name="NAME">', "</atem:parameter>\n"),
        end="</atem:invoke>\n</atem:function_calls>",
        between="<|eom|><|start|>assistant",
    ),
    "qwen25": _HERMES,
    "qwen3_coder": ForcedCalls(
        begin="<tool_call>\n<function=NAME>\n", style="qwen_xml", end="</function>\n</tool_call>", between="\n"
    ),
    "step3": ForcedCalls(
        begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
        values=('<steptml:parameter name="NAME">', "</steptml:parameter>\n"),
        end="</steptml:invoke><｜tool_call_end｜>\n",
        section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
    ),
}
"""Formats whose calls can be forced. There is no form for the arguments of gemma4, gigachat35, hunyuan-opensource,
lfm2, minicpm5 and pythonic."""


def may_think(reasoning: ReasoningFormat | MessageFormat | None, prompt: str) -> bool:
    """Returns whether an output that follows `prompt` may begin with thoughts."""
    if isinstance(reasoning, ReasoningFormat):
        return reasoning.starts_inside(prompt) or not prompt.rstrip().endswith(reasoning.end)
    return reasoning is not None


def after_thoughts(answer: Format, reasoning: ReasoningFormat | MessageFormat | None, prompt: str) -> Format:
    """An output whose answer, behind its thoughts, is as `answer` says. `prompt`: its end."""
    if reasoning is None or not may_think(reasoning, prompt):
        return answer
    any_text = {"type": "any_text"}
    if isinstance(reasoning, MessageFormat):
        begin, end = reasoning.around_thoughts
        thoughts = _tag(begin, any_text, end + reasoning.next_message)
        return _sequence({"type": "optional", "content": thoughts}, answer)
    if reasoning.starts_inside(prompt):
        return _sequence(_tag("", any_text, reasoning.end), _SPACE, answer)
    thoughts = _sequence(_tag(reasoning.begin, any_text, reasoning.end), _SPACE)
    return _sequence({"type": "optional", "content": thoughts}, answer)


_SPACE = {"type": "regex", "pattern": "\\n{0,2}"}


def as_message(answer: Format, messages: MessageFormat) -> Format:
    """A constrained answer as a message of such a format."""
    return _sequence(_constant(messages.answer_header), answer)


def answer_format(kind: str, source: Any) -> Format | None:
    """The part of a structural tag that means the same as a grammar of `kind` json_schema, regex or ebnf, or as a whole
    structural tag; None for tags of the older form. `source` is text, or JSON read."""
    if kind == "structural_tag":
        inner = source.get("format") if isinstance(source, dict) else None
        return inner if isinstance(inner, dict) else None
    if kind == "json_schema":
        return _json(source)
    return {"type": "regex", "pattern": source} if kind == "regex" else {"type": "grammar", "grammar": source}
