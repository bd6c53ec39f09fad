"""Grammars that make a model write calls in its own format: structural tags, as xgrammar defines them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.grammar import MAX_WHITESPACE
from sglang.srt.function_call.harmony import CHANNEL, CONSTRAIN, MESSAGE
from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.messages import MessageFormat, Start
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.tagged_arguments import NAME, tagged_arguments, verify_count

Format = dict[str, Any]
"""A part of a structural tag."""
ESCAPED = "ESCAPED"
"""Stands for a function's name within a JSON string, as NAME does elsewhere."""
_PLACE = re.compile(f"{NAME}|{ESCAPED}")

_ARGUMENTS: Mapping[str, tuple[str, str]] = {
    "deepseek_v4_1_xml": ('<｜DSML｜ parameter name="NAME" string="true">', "</｜DSML｜ parameter>\n"),
    "deepseek_xml": ('<｜DSML｜parameter name="NAME" string="true">', "</｜DSML｜parameter>\n"),
    "glm_xml": ("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax_m3_xml": ("]<]minimax[>[<NAME>", "]<]minimax[>[</NAME>"),
    "minimax_xml": ('<parameter name="NAME">', "</parameter>\n"),
    "qwen_xml": ("<parameter=NAME>\n", "\n</parameter>\n"),
}
"""Style of arguments -> what stands around one, as xgrammar defines it."""
_NESTED = frozenset(("minimax_m3_xml",))
"""Styles in which the entries of objects and arrays are tags, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCalls:
    """The parts of a format's calls for a grammar. `begin` and `end` stand around a call's arguments; `begin` contains
    NAME for the function's name, or ESCAPED for it in a JSON string. `number`: a number and this text follow it.
    `style`: how the arguments are written. `section` stands around a row of calls, `between` between them. `single`:
    nothing follows a call. `header`: stands before `begin` if only calls are allowed; elsewhere it is part of the text.
    `values`: marks around a tagged argument, with NAME for its name."""

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
        """Returns the format of calls and nothing else. tools: name -> schema of the arguments. one: exactly one
        call."""
        row = {
            "type": "tags_with_separator",
            "tags": self._tags(tools, self.header),
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": one or self.single,
        }
        return self._section(row) if self.section is not None else row

    def among_text(self, tools: Mapping[str, Format], one: bool) -> Format:
        """Returns the format of any text in which each call is a call of one of the tools."""
        if self.section is not None:
            tags, trigger = [self.at_least_one(tools, one)], self.section[0]
        else:
            tags, trigger = self._tags(tools), _PLACE.split(self.begin)[0]
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": one or self.single}

    def _tags(self, tools: Mapping[str, Format], header: str = "") -> list[Format]:
        if self.values is not None:
            verify_count(tools.values())
        begin = header + self.begin
        return [_tag(_with_name(begin, name), self._content(schema), self.end) for name, schema in tools.items()]

    @property
    def has_tags(self) -> bool:
        """Returns whether names of arguments are in tags instead of JSON."""
        return self.values is not None or self.style in _ARGUMENTS

    @property
    def has_nested_tags(self) -> bool:
        """Returns whether the entries of objects and arrays are tags too."""
        return self.style in _NESTED

    @property
    def escapes_names(self) -> bool:
        """Returns whether functions' names occur only within JSON."""
        return NAME not in self.header + self.begin

    def written(self, name: str, arguments: Sequence[str]) -> str:
        """Returns a call as a grammar allows it. arguments: their names, with arbitrary values; empty for JSON."""
        number = f"0{self.number}" if self.number else ""
        before, after = self.section or ("", "")
        return before + _with_name(self.header + self.begin, name) + number + self._words(arguments) + self.end + after

    def _words(self, names: Sequence[str]) -> str:
        tags = self.values or _ARGUMENTS.get(self.style)
        if tags is None:
            return "{}"
        return "".join(f"{_with_name(tags[0], name)}word{_with_name(tags[1], name)}" for name in names)

    def _content(self, schema: Format) -> Format:
        if self.values is not None:
            return tagged_arguments(schema, *self.values)
        if self.has_nested_tags and _is_any_object(schema):
            return {"type": "any_text"}
        arguments = {**_json(schema), "style": self.style}
        if not self.number:
            return arguments
        return _sequence({"type": "regex", "pattern": "[0-9]{1,6}"}, _constant(self.number), arguments)

    def _section(self, row: Format) -> Format:
        assert self.section is not None
        return _tag(self.section[0], row, self.section[1])


def _with_name(text: str, name: str) -> str:
    """Inserts a name in one pass, as it may itself contain the placeholders."""
    return _PLACE.sub(lambda place: escaped(name) if place[0] == ESCAPED else name, text)


def _is_any_object(schema: Format) -> bool:
    """Returns whether a schema names nothing, for which nested tags have no grammar."""
    return not schema.get("properties") and schema.get("additionalProperties") not in (None, False)


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


_HERMES = ForcedCalls(begin='<tool_call>\n{"name": "ESCAPED", "arguments": ', end="}\n</tool_call>", between="\n")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _dsml(section: str, mark: str = "｜DSML｜", style: str = "deepseek_xml") -> ForcedCalls:
    return ForcedCalls(
        begin=f'<{mark}invoke name="NAME">\n',
        style=style,
        end=f"</{mark}invoke>\n",
        section=(f"<{mark}{section}>\n", f"</{mark}{section}>"),
    )


def _invoke(section: str, tag: str = "", style: str = "minimax_xml") -> ForcedCalls:
    """Returns the format of MiniMax's kind of calls. `tag` stands before every tag."""
    return ForcedCalls(
        begin=f'{tag}<invoke name="NAME">' + ("" if tag else "\n"),
        style=style,
        end=f"{tag}</invoke>\n",
        section=(f"{tag}<{section}>\n", f"{tag}</{section}>"),
    )


FORCED_CALLS: Mapping[str, ForcedCalls] = {
    "apertus2509": ForcedCalls(
        begin='{"ESCAPED": ', end="}", section=("<|tools_prefix|>[", "]<|tools_suffix|>"), between=", "
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
    "gigachat3": ForcedCalls(begin='<|function_call|>{"name": "ESCAPED", "arguments": ', end="}"),
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
        begin='<|content_invoke_tool_json|>{"name":"ESCAPED","args":',
        end="}<|end_message|>",
        between="<|message_model|>",
    ),
    "interns1": ForcedCalls(
        begin='<|action_start|> <|plugin|>\n{"name": "ESCAPED", "parameters": ', end="}<|action_end|>"
    ),
    "iquest_q1": ForcedCalls(begin="<iquest_tool_call>NAME", style="glm_xml", end="</iquest_tool_call>"),
    "kimi_k2": ForcedCalls(
        begin="<|tool_call_begin|>functions.NAME:",
        number="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "llama3": ForcedCalls(begin='{"name": "ESCAPED", "parameters": ', end="}", between="; "),
    "mimo": ForcedCalls(
        begin="<tool_call><function=NAME>",
        values=("<parameter=NAME>", "</parameter>"),
        end="</function></tool_call>",
    ),
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
hy_v4, lfm2, minicpm5 and pythonic."""


def may_think(reasoning: ReasoningFormat | MessageFormat | None, prompt: str, start: Start = Start.HEADER) -> bool:
    """Returns whether an output after `prompt` may begin with thoughts. start: where it begins in a format of
    messages."""
    if isinstance(reasoning, ReasoningFormat):
        return reasoning.starts_inside(prompt) or not prompt.rstrip().endswith(reasoning.end)
    return reasoning is not None and start is not Start.TEXT


def after_thoughts(
    answer: Format, reasoning: ReasoningFormat | MessageFormat | None, prompt: str, start: Start = Start.HEADER
) -> Format:
    """Returns the format of an output whose answer after its thoughts has the format `answer`. `prompt`: its end.
    start: in a format of messages."""
    if reasoning is None or not may_think(reasoning, prompt, start):
        return answer
    any_text = {"type": "any_text"}
    if isinstance(reasoning, MessageFormat):
        begin, end = reasoning.thought_marks
        header = _constant(reasoning.next_message)
        if start is Start.THOUGHTS:
            return _sequence(_tag("", any_text, end), header, answer)
        thoughts = _sequence(_tag(begin, any_text, end), header)
        return _sequence({"type": "optional", "content": thoughts}, answer)
    if reasoning.starts_inside(prompt):
        return _sequence(_tag("", any_text, reasoning.end), _SPACE, answer)
    thoughts = _sequence(_tag(reasoning.begin, any_text, reasoning.end), _SPACE)
    return _sequence({"type": "optional", "content": thoughts}, answer)


_SPACE = {"type": "regex", "pattern": "\\n{0,2}"}


def as_message(answer: Format, messages: MessageFormat) -> Format:
    """Returns a constrained answer as a message of this format."""
    return _sequence(_constant(messages.answer_header), answer)


def as_next_message(message: Format, messages: MessageFormat) -> Format:
    """Returns a message after a body, which it ends first."""
    return _sequence(_constant(messages.after_body), message)


def answer_format(kind: str, source: Any) -> Format | None:
    """Returns the part of a structural tag equivalent to a grammar of `kind` json_schema, regex or ebnf, or a whole
    structural tag; None for tags of the older form. `source` is text, or parsed JSON."""
    if kind == "structural_tag":
        inner = source.get("format") if isinstance(source, dict) else None
        return inner if isinstance(inner, dict) else None
    if kind == "json_schema":
        return _json(source)
    return {"type": "regex", "pattern": source} if kind == "regex" else {"type": "grammar", "grammar": source}
