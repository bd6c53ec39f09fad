"""Renders conversations with a model's Jinja chat template.

A template is a program from the checkpoint that runs on client input, so a server calls this in separate processes
(`template_pool`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from sglang.srt.entrypoints.http_errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.jinja_environment import MAX_RENDERED, OutputTooLong, make_environment, write
from sglang.srt.entrypoints.openai.message_order import MessageRules, fitted_messages, message_rules, with_names
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.template_messages import CallForm, call_form, separates_parts, template_message
from sglang.srt.errors import UserError
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from sglang.srt.utils.json_nesting import read_json
from sglang.srt.utils.tokenizer_files import SPECIAL_TOKEN_NAMES

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
_SWITCH, _EFFORT = "enable_thinking", "reasoning_effort"
_NO_EFFORT = re.compile(r"""['"]none['"]""")
"""`none` as a string in a template, unlike the value none."""

_SET_BY_SERVER = frozenset({"messages", "tools", "add_generation_prompt", "response_format", *SPECIAL_TOKEN_NAMES})

MAX_ENDING = 64
"""Most characters that a template writes after a message; the check uses a longer text, which therefore does not occur
by chance."""
_OTHER_TEXT = "⁂another text⁂"


class ConversationTooLong(ApiError):
    """Raised when the prompt would be longer than any that fits the context."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, param="messages")


def read_template_file(path: str) -> str:
    """Returns the template text of `--chat-template`: a Jinja file, or a JSON file with a `chat_template` string."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--chat-template: no such file: {path} (give the path of a .jinja or .json file)")
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return text
    try:
        template = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--chat-template: {path} is not a JSON object with a chat_template string") from error
    if not isinstance(template, str):
        raise UserError(f"--chat-template: chat_template in {path} is not a string")
    return template


class ChatTemplate:
    """Compiled chat templates of one model.

    `source` is the template's text, a dict of texts by name (`default`, `tool_use`), or None if the model has none.
    Templates get `special_tokens` (bos_token, eos_token, ...) and `defaults` as variables; a request's variables
    override `defaults`. `max_chars` limits what a template may write.
    """

    def __init__(
        self,
        source: str | dict[str, str] | None,
        special_tokens: dict[str, str],
        defaults: Mapping[str, Any] | None = None,
        max_chars: int = MAX_RENDERED,
    ) -> None:
        sources = {_DEFAULT: source} if isinstance(source, str) else (source or {})
        self._sources = sources
        environment = make_environment()
        self._globals = frozenset(environment.globals)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except (
            jinja2.TemplateError,
            RecursionError,
            SyntaxError,
        ) as error:  # the latter two: nested too deeply
            raise UserError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens
        self._defaults = defaults or {}
        self._max_chars = max_chars
        probes = {
            name: functools.partial(self._render_bare, name, tools=None, add_generation_prompt=False)
            for name in self._templates
        }
        self._call_forms = {name: call_form(probe) for name, probe in probes.items()}
        self._keeping_parts = {name for name, probe in probes.items() if separates_parts(probe)}
        self._message_rules: dict[str, MessageRules] = {}
        self._message_rules = {
            name: message_rules(functools.partial(self._rendered_probe, name, probe)) for name, probe in probes.items()
        }

    def render(self, request: ChatCompletionRequest) -> str:
        """Returns the prompt text. Raises ApiError 400 for conversations that the model or its template does not
        accept."""
        tools = _template_tools(request)
        name = self._pick(tools)
        messages = self._messages(name, request.messages)
        continued = _continued_text(request, messages) if request.continue_final_message else None
        template = self._template(name)
        asked = {**_effort(request.reasoning_effort), **self._asked_variables(request)}
        variables: dict[str, Any] = {
            **self._special_tokens,
            **self._defaults,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": request.add_generation_prompt and continued is None,
            **_answer_form(request),
            **asked,
        }
        if variables.get(_SWITCH) is False and _EFFORT not in asked and _is_quiet_by_effort(self._sources[name]):
            variables[_EFFORT] = "none"
        try:
            text = write(template, variables, self._max_chars)
        except OutputTooLong as error:
            raise ConversationTooLong(f"{error}; send fewer or shorter messages") from None
        except jinja2.TemplateError as error:
            advice = self._advice(name, request)
            raise bad_request(f"the chat template refused the messages: {error}{advice}", param="messages") from error
        except Exception as error:  # a template is a program that runs on a client's values
            reason = f"{type(error).__name__}: {error}"
            raise bad_request(f"the chat template failed on these messages: {reason}", param="messages") from error
        if continued is None:
            return text
        ending = _ending(template, variables, self._max_chars) if len(continued) <= MAX_ENDING else ""
        return _cut_after(text, continued, ending)

    def _advice(self, name: str, request: ChatCompletionRequest) -> str:
        """Returns what the server's owner can do about a refusal, if that is for the order of the messages."""
        rules = self._message_rules[name]
        if fitted_messages(request.messages, rules, in_place=True) == request.messages:
            return ""
        return "; a server with --fold-system-messages in-place joins messages as this template wants them"

    def message_rules(self, tools: list[dict[str, Any]] | None) -> MessageRules:
        """Returns the message orders that conversations with these tools may have."""
        return self._message_rules.get(self._pick(tools), MessageRules())

    @property
    def sources(self) -> str:
        """Returns the text of all templates."""
        return "\n".join(self._sources.values())

    def render_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """Renders messages like `render`, without the variables that the server's flags and a request set. Raises
        ValueError if the template refuses."""
        try:
            name = self._pick(tools)
            return self._render_bare(name, self._messages(name, messages), tools, add_generation_prompt)
        except Exception as error:
            raise ValueError(f"the chat template failed: {error}") from error

    def _rendered_probe(self, name: str, render: Callable[..., str], messages: list[dict[str, Any]]) -> str:
        return render(self._messages(name, messages))

    def _render_bare(
        self, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        variables: dict[str, Any] = {**self._special_tokens, "messages": messages, "tools": tools}
        variables["add_generation_prompt"] = add_generation_prompt
        return write(self._template(name), variables, self._max_chars)

    def _asked_variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """Returns the request's variables. Raises ApiError 400 for reserved names."""
        asked = request.chat_template_kwargs or {}
        taken = sorted(asked.keys() & (_SET_BY_SERVER | self._globals))
        if taken:
            raise bad_request(
                f"chat_template_kwargs may not set {', '.join(taken)}: the server sets what has this name in a "
                "template. What the request's own fields say (messages, tools, response_format, ...) goes there",
                param="chat_template_kwargs",
            )
        return asked

    def _pick(self, tools: list[dict[str, Any]] | None) -> str:
        """Returns the name of the template for a request with these tools."""
        return _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT

    def _messages(self, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        form = self._call_forms.get(name, CallForm())
        shown = [template_message(message, form, name in self._keeping_parts) for message in messages]
        return with_names(shown) if self._message_rules.get(name, MessageRules()).named_results else shown

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            raise bad_request(
                "this model has no chat template: start the server with --chat-template FILE, or use /v1/completions"
            )
        return self._templates[name]


def _template_tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    return [{"type": "function", "function": tool["function"]} for tool in request.tools]


def _answer_form(request: ChatCompletionRequest) -> dict[str, Any]:
    """Returns `response_format` as a client writes it, for templates that describe it to the model; None for plain
    text."""
    given = request.response_format
    if given is not None and given.type != "text":
        return {"response_format": msgspec.to_builtins(given)}
    if request.json_schema is not None:
        schema = _schema(request.json_schema)
        if schema is None:
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    grammars = [name for name in ("regex", "ebnf", "structural_tag") if getattr(request, name) is not None]
    return {"response_format": {"type": grammars[0]}} if grammars else {}


def _schema(given: str | dict[str, Any]) -> Any:
    """Returns the schema; None for text that is not JSON: SGLang's word for any object, or an invalid value that is
    refused later by name."""
    if not isinstance(given, str):
        return given
    try:
        return read_json(given) if len(given) <= MAX_GRAMMAR_LENGTH else None
    except ValueError:
        return None


def _effort(effort: str | None) -> dict[str, Any]:
    """Returns the effort for templates, most of which have a switch instead of the word none."""
    if effort == "none":
        return {_SWITCH: False, "thinking": False}
    return {} if effort is None else {_EFFORT: effort}


def _is_quiet_by_effort(source: str) -> bool:
    """Returns whether a template turns thoughts off by an effort instead of a switch, as Inkling's does."""
    return _SWITCH not in source and _EFFORT in source and _NO_EFFORT.search(source) is not None


def _continued_text(request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str:
    if request.messages[-1]["role"] != "assistant":
        raise bad_request(
            'continue_final_message needs a last message with role "assistant"', param="continue_final_message"
        )
    content = messages[-1]["content"]
    text = content.lstrip() if isinstance(content, str) else ""
    if not text:
        raise bad_request("continue_final_message needs text in the last message", param="continue_final_message")
    return text


def _ending(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    """Returns what the template writes after the text of the last message; "" if it does not accept another text
    there."""
    messages = variables["messages"]
    messages = [*messages[:-1], {**messages[-1], "content": _OTHER_TEXT}]
    try:
        other = write(template, {**variables, "messages": messages}, max_chars)
    except Exception:  # a template is a program
        return ""
    return other.rpartition(_OTHER_TEXT)[2] if _OTHER_TEXT in other else ""


def _cut_after(rendered: str, text: str, ending: str) -> str:
    """Returns the rendered conversation up to the end of its last message's text, so that the model continues it.
    `ending`: the text that may follow, which may contain the same characters.

    Templates that trim messages lose the text's trailing space.
    """
    end = len(rendered.removesuffix(ending))
    for kept in (text, text.rstrip()):
        start = rendered.rfind(kept, 0, end)
        if start >= 0:
            return rendered[: start + len(kept)]
    raise bad_request(
        "continue_final_message: the chat template changes the last message's text", param="continue_final_message"
    )
