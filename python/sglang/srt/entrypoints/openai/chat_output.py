"""Output formats of a chat request: which of them apply to the model's text, and which grammar they need."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from sglang.srt.constrained.grammar import ANY_JSON
from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from sglang.srt.function_call.events import Event, TextDelta
from sglang.srt.function_call.forcing import (
    FORCED_CALLS,
    ForcedCalls,
    Format,
    after_thoughts,
    answer_format,
    as_message,
    as_next_message,
    may_think,
)
from sglang.srt.function_call.messages import MessageFormat, Start
from sglang.srt.function_call.model_formats import ModelFormats, tool_schemas
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.registry import NUMBERED_IDS, SHORT_ID, SHORT_IDS
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.sampling.grammar_names import tag_of_format
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.utils.hf_tokenizer import Tokenizer
from sglang.srt.utils.json_nesting import read_json

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
PROMPT_END_CHARS = 256
"""Characters at the end of a prompt that show whether it ends within thoughts: more than any mark has."""
_ANY_OBJECT: Format = {"type": "object", "additionalProperties": True}
_TYPED_BY = frozenset(
    "type properties patternProperties additionalProperties $ref anyOf oneOf allOf enum const".split()
)
"""Keywords one of which a schema of arguments needs; without any, a grammar would accept every value."""


class ChatFormats:
    """The formats of one request. Of the request they hold only its tools. `prompt`: the rendered conversation, or its
    end."""

    def __init__(self, formats: ModelFormats, body: ChatCompletionRequest, prompt: str) -> None:
        self._formats = formats
        self._separate, self._whole_thoughts = body.separate_reasoning, not body.stream_reasoning
        self._functions = [tool["function"] for tool in body.tools or ()]
        self._named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None
        self._forces_call = body.tool_choice == "required" or self._named is not None
        self._one_call = self._named is not None or body.parallel_tool_calls is False
        reasoning, messages = formats.reasoning, formats.messages
        self._start = Start.HEADER
        if body.continue_final_message and body.input_ids is None:
            if messages is not None:
                self._start = _start_behind(prompt, messages, reasoning)
            if isinstance(reasoning, ReasoningFormat):
                prompt = reasoning.end_mark_after(str(body.messages[-1].get("content")))
        self._prompt_end = prompt.rstrip()[-PROMPT_END_CHARS:]
        self.tools = tool_schemas(body.tools) if formats.calls is not None and body.tool_choice != "none" else {}
        self._calls_before = _num_calls(body.messages)
        if isinstance(reasoning, ReasoningFormat):
            self._inside = reasoning.starts_inside(prompt)
        else:
            self._inside = self._start is Start.THOUGHTS
        self._is_constrained = False
        self.thinks_first = False
        """True if thoughts may come before an answer that a grammar asks for; set by `constrain`."""

    @property
    def parses(self) -> bool:
        """Returns whether outputs are more than text."""
        return bool(self.tools) or self._formats.reasoning is not None or isinstance(self._formats.calls, MessageFormat)

    @property
    def num_bytes(self) -> int:
        """Returns the approximate size of the tools, which are held while the answer is read."""
        return len(msgspec.json.encode(self._functions))

    @property
    def counts_reasoning(self) -> bool:
        """Returns whether thoughts are counted."""
        return self._formats.reasoning is not None

    def thinking_budget(self, tokenizer: Tokenizer, num_tokens: int) -> ThinkingBudget | None:
        """Returns a limit for the thoughts of an output. None for a model without thoughts; also None for one that
        writes messages, unless the answer is constrained, because in a free answer it may think again."""
        reasoning = self._formats.reasoning
        if reasoning is None or (isinstance(reasoning, MessageFormat) and not self._is_constrained):
            return None
        begin, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in reasoning.thought_marks)
        return ThinkingBudget(num_tokens, begin, end, self._inside)

    def new_parser(self) -> OutputParser:
        """Returns a parser for one choice."""
        return OutputParser(
            calls=self._formats.calls,
            tools=self.tools,
            reasoning=self._formats.reasoning,
            inside=self._inside,
            start=self._start,
            separate=self._separate,
            whole_thoughts=self._whole_thoughts,
        )

    def call_id(self, name: str, number: int, prefix: str = "call_") -> str:
        """Returns an id for call `number` of an answer. `prefix`: for ids that mean nothing to the model."""
        if self._formats.calls_name in NUMBERED_IDS:
            return self._formats.counted_id(name, self._calls_before + number)
        if self._formats.calls_name in SHORT_IDS:
            return uuid.uuid4().hex[:SHORT_ID]
        return prefix + uuid.uuid4().hex[:24]

    def constrain(self, params: dict[str, Any]) -> None:
        """Adds the grammar that the formats and `tool_choice` need to sampling parameters. Raises ApiError 400."""
        if self.parses and self._formats.hidden_markers:
            params["skip_special_tokens"] = False
        given = next((name for name in GRAMMARS if name in params), None)
        if sum(name in params for name in GRAMMARS) > 1 or len(params.get(given or "", "")) > MAX_GRAMMAR_LENGTH:
            return  # refused later, under the names that the client knows
        answer = None
        if given is not None and self.parses:
            answer = constrained_answer(given, params[given])
            messages = self._formats.messages
            if answer is not None and messages is not None and self._start is not Start.TEXT:
                answer = as_message(answer, messages)
        try:
            answer = self._with_calls(given, answer)
        except ValueError as error:
            raise bad_request(str(error), param="tools") from None
        if answer is not None:
            self._is_constrained = given is not None or self._forces_call
            behind = (self._formats.reasoning, self._prompt_end, self._start)
            self.thinks_first = self._is_constrained and may_think(*behind)
            tag = after_thoughts(answer, *behind)
            params.pop(given or "", None)
            params["structural_tag"] = encoded_tag(tag_of_format(given or "tools", tag))

    def _with_calls(self, given: str | None, answer: Format | None) -> Format | None:
        """Returns the format of an output with the calls that `tool_choice` requires or allows. Raises ApiError, and
        ValueError for parameters that cannot become a grammar."""
        if self._forces_call:
            if given is not None:
                raise bad_request(
                    f"tool_choice forces a call, and {given} another output: give one of them.", param="tool_choice"
                )
            return self._calls(self._forced_format())
        forced = FORCED_CALLS.get(self._formats.calls_name or "") if self.tools else None
        return answer if forced is None else self._calls_or(forced, answer, given is not None)

    def _forced_format(self) -> ForcedCalls:
        name = self._formats.calls_name
        if name is not None and name in FORCED_CALLS:
            return FORCED_CALLS[name]
        lack = "needs a server with --tool-call-parser" if name is None else f"is not possible with calls like {name}'s"
        raise bad_request(f'tool_choice that forces a call {lack}; use tool_choice "auto"', param="tool_choice")

    def _calls(self, forced: ForcedCalls) -> Format:
        """Returns the format of calls of the allowed functions, by their schemas."""
        schemas = {
            function["name"]: _arguments_schema(function.get("parameters"))
            for function in self._functions
            if self._named in (None, function["name"])
        }
        return self._only_calls(forced, schemas)

    def _only_calls(self, forced: ForcedCalls, schemas: dict[str, Format]) -> Format:
        calls, messages = forced.at_least_one(schemas, self._one_call), self._formats.messages
        return calls if messages is None or self._start is not Start.TEXT else as_next_message(calls, messages)

    def _calls_or(self, forced: ForcedCalls, answer: Format | None, constrained: bool) -> Format | None:
        """Returns the format for a model that chooses between calls and text: calls or the constrained answer, or calls
        among free text if something restricts them. Returns None if nothing does."""
        schemas = {
            function["name"]: _arguments_schema(function.get("parameters") if function.get("strict") else None)
            for function in self._functions
        }
        if constrained:
            calls = self._only_calls(forced, schemas)
            return None if answer is None else {"type": "or", "elements": [calls, answer]}
        if self._one_call or any(function.get("strict") for function in self._functions):
            return forced.among_text(schemas, self._one_call)
        return None


def _start_behind(prompt: str, messages: MessageFormat, reasoning: ReasoningFormat | MessageFormat | None) -> Start:
    """Returns where in a message the output begins. Thoughts are text for a server that does not separate them."""
    start = messages.start_behind(prompt)
    return Start.TEXT if start is Start.THOUGHTS and not isinstance(reasoning, MessageFormat) else start


def _arguments_schema(parameters: Format | None) -> Format:
    """Returns the schema of arguments, made an object also where the parameters do not say so."""
    parameters = parameters or {}
    return parameters if parameters.keys() & _TYPED_BY else {**_ANY_OBJECT, **parameters}


def constrained_answer(kind: str, source: str) -> Format | None:
    """Returns the format of an answer like `answer_format`, for a client's request. Raises ApiError 400."""
    if source == ANY_JSON:
        return answer_format(kind, _ANY_OBJECT)
    return answer_format(kind, _read_json(source) if kind in ("json_schema", "structural_tag") else source)


def encoded_tag(tag: Format) -> str:
    """Returns the structural tag in the form of sampling parameters."""
    return msgspec.json.encode(tag).decode()


def _read_json(source: str) -> Any:
    try:
        return read_json(source)
    except ValueError as error:
        raise bad_request(f"the schema or structural tag is {error}") from None


def _num_calls(messages: list[dict[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages if message["role"] == "assistant")


class ChoiceOutput:
    """Parses one choice's text into events, and counts the tokens of its thoughts."""

    def __init__(self, formats: ChatFormats, tokenizer: Tokenizer | None) -> None:
        self._parser = formats.new_parser() if formats.parses else None
        self._tokenizer = tokenizer
        self._counts = formats.counts_reasoning
        self._ids: list[int] = []
        self._texts: list[str] = []
        """The text behind the last thoughts that were counted."""
        self._counted_end = 0
        self._counted_bytes = 0
        self._num_counted = 0
        self._token_bytes = 0

    @property
    def num_held(self) -> int:
        """Returns the characters of earlier pieces whose events are still to come."""
        return 0 if self._parser is None else self._parser.num_held

    def push(self, output: GenerateOutput) -> list[Event]:
        """Returns the events of the next piece; the last piece gives all that is left. Sets the piece's
        `reasoning_tokens`."""
        if self._parser is None:
            return [TextDelta(output.text)] if output.text else []
        if self._counts:
            self._ids.extend(output.new_ids)
            self._texts.append(output.text)
        events = self._parser.push(output.text)
        if output.finish is not None:
            events += self._parser.finish()
        if self._counts:
            output.meta.reasoning_tokens = self._reasoning_tokens(self._parser)
        return events

    def _reasoning_tokens(self, parser: OutputParser) -> int:
        """Returns the tokens up to the end of the last thoughts, including their marks."""
        if parser.in_reasoning:
            return len(self._ids)
        num_new = parser.reasoning_end - self._counted_end
        if num_new:
            text = "".join(self._texts)
            self._texts = [text[num_new:]]
            self._counted_end += num_new
            self._counted_bytes += len(text[:num_new].encode())
            assert self._tokenizer is not None
            while self._token_bytes < self._counted_bytes and self._num_counted < len(self._ids):
                self._token_bytes += len(self._tokenizer.token_bytes(self._ids[self._num_counted]))
                self._num_counted += 1
        return self._num_counted
