"""What a chat request makes of the model's text: which formats apply to it, and what it may force."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from sglang.srt.function_call.events import Event
from sglang.srt.function_call.forcing import FORCED_CALLS, Format, after_thoughts, answer_format
from sglang.srt.function_call.harmony import Harmony
from sglang.srt.function_call.model_formats import ModelFormats, tool_schemas
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.registry import NUMBERED_IDS
from sglang.srt.managers.generate_request import GenerateOutput
from sglang.srt.utils.hf_tokenizer import Tokenizer

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_ANY_OBJECT: Format = {"type": "object"}


class ChatFormats:
    """The formats of one request. `prompt`: the rendered conversation, or its end."""

    def __init__(self, formats: ModelFormats, body: ChatCompletionRequest, prompt: str) -> None:
        self._formats = formats
        self._body = body
        self._prompt = prompt
        self.tools = tool_schemas(body.tools) if formats.calls is not None and body.tool_choice != "none" else {}
        self._calls_before = _num_calls(body.messages)
        reasoning = formats.reasoning
        self._inside = reasoning is not None and not isinstance(reasoning, Harmony) and reasoning.starts_inside(prompt)

    @property
    def parses(self) -> bool:
        """Whether outputs are more than text."""
        return bool(self.tools) or self._formats.reasoning is not None or isinstance(self._formats.calls, Harmony)

    @property
    def counts_reasoning(self) -> bool:
        return self._formats.reasoning is not None

    def new_parser(self) -> OutputParser:
        """For one choice."""
        return OutputParser(
            calls=self._formats.calls,
            tools=self.tools,
            reasoning=self._formats.reasoning,
            inside=self._inside,
            separate=self._body.separate_reasoning,
            whole_thoughts=not self._body.stream_reasoning,
        )

    def call_id(self, name: str, number: int) -> str:
        """`number`: of the call in its answer."""
        if self._formats.calls_name in NUMBERED_IDS:
            return f"functions.{name}:{self._calls_before + number}"
        return f"call_{uuid.uuid4().hex[:24]}"

    def constrain(self, params: dict[str, Any]) -> None:
        """Adds to sampling parameters what the formats and `tool_choice` ask for. Raises ApiError 400."""
        if self.parses and self._formats.hidden_markers:
            params["skip_special_tokens"] = False
        answer = self._forced_calls()
        given = [name for name in _GRAMMARS if name in params]
        if answer is not None and given:
            raise bad_request(
                f"tool_choice and strict tools constrain the output, and so does {given[0]}: give one of them.",
                param="tool_choice",
            )
        if answer is None and given and self._formats.reasoning is not None:
            source = params[given[0]]
            answer = answer_format(given[0], _read_json(source) if "json" in given[0] or "tag" in given[0] else source)
            if answer is not None:
                del params[given[0]]
        if answer is not None:
            tag = after_thoughts(answer, self._formats.reasoning, self._prompt)
            try:
                params["structural_tag"] = msgspec.json.encode(tag).decode()
            except RecursionError:
                raise bad_request("a schema of the tools is nested too deeply", param="tools") from None

    def _forced_calls(self) -> Format | None:
        choice, tools = self._body.tool_choice, self._body.tools or []
        named = choice.function.name if isinstance(choice, NamedToolChoice) else None
        forces = choice == "required" or named is not None
        if not forces and not (self.tools and any(tool["function"].get("strict") for tool in tools)):
            return None
        forced = FORCED_CALLS.get(self._formats.calls_name or "")
        if forced is None:
            if not forces:
                return None
            reason = (
                "needs a server with --tool-call-parser"
                if self._formats.calls_name is None
                else f"is not possible with --tool-call-parser {self._formats.calls_name}"
            )
            raise bad_request(f'tool_choice that forces a call {reason}; use tool_choice "auto"', param="tool_choice")
        one = named is not None or self._body.parallel_tool_calls is False
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or _ANY_OBJECT
            for tool in tools
            if named is None or tool["function"]["name"] == named
        }
        if forces:
            return forced.at_least_one(schemas, one)
        strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict")}
        return forced.among_text(
            {name: schema if name in strict else _ANY_OBJECT for name, schema in schemas.items()}, one
        )


def _read_json(source: str) -> Any:
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        raise bad_request("the schema or structural tag is not JSON, or nested too deeply") from None


def _num_calls(messages: list[dict[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages if message["role"] == "assistant")


class ChoiceOutput:
    """One choice's text as events, and how many of its tokens are thoughts."""

    def __init__(self, formats: ChatFormats, tokenizer: Tokenizer) -> None:
        self._parser = formats.new_parser()
        self._tokenizer = tokenizer
        self._counts = formats.counts_reasoning
        self._ids: list[int] = []
        self._texts: list[str] = []
        """The text behind the last thoughts that were counted."""
        self._counted_end = 0
        self._counted_bytes = 0
        self._num_counted = 0
        self._token_bytes = 0

    def push(self, output: GenerateOutput) -> list[Event]:
        """The events of the next piece; the last piece has all that is left."""
        if self._counts:
            self._ids.extend(output.new_ids)
            self._texts.append(output.text)
        events = self._parser.push(output.text)
        return events if output.finish is None else events + self._parser.finish()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the last thoughts, their marks included."""
        if self._parser.in_reasoning:
            return len(self._ids)
        num_new = self._parser.reasoning_end - self._counted_end
        if num_new:
            text = "".join(self._texts)
            self._texts = [text[num_new:]]
            self._counted_end += num_new
            self._counted_bytes += len(text[:num_new].encode())
            while self._token_bytes < self._counted_bytes and self._num_counted < len(self._ids):
                self._token_bytes += len(self._tokenizer.token_bytes(self._ids[self._num_counted]))
                self._num_counted += 1
        return self._num_counted
