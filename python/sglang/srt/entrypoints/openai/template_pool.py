"""Renders conversations in processes with limits of time, memory and output.

A chat template is a program from the checkpoint and may take any time on a client's input. Short conversations pass
long ones: one of the processes takes no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sglang.srt.entrypoints.http_errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.chat_template import ConversationTooLong
from sglang.srt.entrypoints.openai.jinja_environment import MAX_RENDERED
from sglang.srt.entrypoints.openai.media_parts import media_kind
from sglang.srt.entrypoints.openai.message_order import MessageRules
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.template_process import (
    WORKING_BYTES,
    Compiled,
    Probe,
    Refused,
    Rendered,
    Reply,
    TemplateSource,
    packed,
    run_templates,
)
from sglang.srt.errors import UserError
from sglang.srt.managers.front.job_process import JobProcess, ProcessEnded, end_all
from sglang.srt.managers.front.request_preparation import CHARS_PER_TOKEN_BOUND
from sglang.srt.managers.front.worker_threads import WorkerThreads
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_FIELDS = (
    "messages",
    "tools",
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
)
"""Fields of a request that a template gets, besides `tool_choice`."""


class TemplateLimits(NamedTuple):
    """Limits of the template processes."""

    seconds: float = 10.0
    """Limit of one job, and of compiling the template."""
    contended_seconds: float = 2.0
    """Limit of one job while others wait for its process."""
    start_seconds: float = 120.0
    """Limit of a process's imports at its start."""
    max_chars: int = MAX_RENDERED
    """Limit of a conversation, before and after rendering."""
    working_bytes: int = WORKING_BYTES


def template_limits(args: ServerArgs, context_len: int) -> TemplateLimits:
    """Returns limits that refuse conversations which cannot fit the model's context."""
    longest = MAX_RENDERED if args.allow_auto_truncate else min(MAX_RENDERED, context_len * CHARS_PER_TOKEN_BOUND)
    return TemplateLimits(max_chars=longest)


class _Job:
    def __init__(self, message: bytes) -> None:
        self.message = message
        self.abandoned = False
        """Nobody waits any more."""


class TemplatePool:
    """Processes that render with one model's template. Call `render` on an event loop."""

    def __init__(self, source: TemplateSource, limits: TemplateLimits | None = None, num_long: int = 1) -> None:
        """Starts the processes. num_long: those that take long conversations, besides one that takes only short
        ones."""
        self.sources = source.text
        self._limits = limits or TemplateLimits()
        args = (source, self._limits.max_chars, self._limits.working_bytes)
        self._processes = [JobProcess(run_templates, args, "template") for _ in range(1 + num_long)]
        self._ready = [False] * len(self._processes)
        self._rules = (MessageRules(), MessageRules())
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._threads = WorkerThreads(len(self._processes), "template", num_short=1, first=self._start)

    def wait_ready(self) -> None:
        """Blocks until the template is compiled. Raises UserError if it cannot be within the limits."""
        try:
            self._threads.submit(True, self._wait_ready).result()
        except ApiError as error:
            raise UserError(
                f"{error.message} (chat_template of the model's tokenizer, or --chat-template, which gives another one)"
            ) from None
        if rules := str(self.message_rules(None)):
            logger.info("chat template: it takes %s", rules)

    def message_rules(self, tools: list[dict[str, Any]] | None) -> MessageRules:
        """Returns the message orders that conversations with these tools may have; the template must be ready."""
        return self._rules[bool(tools)]

    @property
    def process_ids(self) -> list[int]:
        """Returns the ids of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def render(self, bodies: Sequence[ChatCompletionRequest], is_long: bool) -> list[str]:
        """Returns the prompts of these conversations. Raises ApiError: 400 if the template refuses or exceeds its
        limits, 503 if it might succeed when no others wait."""
        job = _Job(b"")
        try:  # the future gets no name: a cycle future - error - this frame would stay
            return await asyncio.wrap_future(self._threads.submit(is_long, partial(self._render, job, bodies)))
        except asyncio.CancelledError:
            job.abandoned = True
            raise

    def render_probe(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """Renders like `ChatTemplate.render_probe`; blocks."""
        job = _Job(packed(Probe(messages, tools, add_generation_prompt)))
        future: Future[list[str]] = self._threads.submit(True, partial(self._ask, job))
        try:
            return future.result()[0]
        except ApiError as error:
            raise ValueError(error.message) from None

    def close(self) -> None:
        self._threads.close()
        end_all(self._processes)

    # --- in the threads -----------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._processes[number].start()
        self._ready[number] = False

    def _render(self, job: _Job, bodies: Sequence[ChatCompletionRequest], number: int) -> list[str]:
        job.message = packed([_fields(body) for body in bodies])
        if len(job.message) > self._limits.max_chars + _OVERHEAD:
            raise ConversationTooLong(
                f"the conversation of {len(job.message)} bytes is longer than what a prompt may have here, "
                f"{self._limits.max_chars} characters; send fewer or shorter messages"
            )
        return self._ask(job, number)

    def _ask(self, job: _Job, number: int) -> list[str]:
        self._wait_ready(number)
        reply = self._receive(number, job)
        if isinstance(reply, Refused) and reply.too_long:
            raise ConversationTooLong(reply.message)
        if isinstance(reply, Refused):
            raise bad_request(reply.message, param=reply.param)
        assert isinstance(reply, Rendered)
        return reply.texts

    def _receive(self, number: int, job: _Job) -> Reply:
        limits = self._limits
        crowded = False

        def should_stop(seconds: float) -> bool:
            nonlocal crowded
            crowded = seconds >= limits.contended_seconds and self._threads.has_waiting(number)
            return crowded or seconds >= limits.seconds or job.abandoned

        try:
            return self._decoder.decode(self._processes[number].ask(job.message, should_stop))
        except ProcessEnded as error:
            self._start(number)
            if not error.is_late:
                raise bad_request(
                    "the chat template ended its process with these messages, as one does that takes too much memory; "
                    "send fewer or shorter ones",
                    param="messages",
                ) from None
            limit_s = limits.contended_seconds if crowded else limits.seconds
            text = f"the chat template takes more than {limit_s:g} s for these messages; send fewer or shorter ones"
            if crowded:
                raise ApiError(503, f"{text}, or send them again when no others wait") from None
            raise bad_request(text, param="messages") from None

    def _wait_ready(self, number: int) -> None:
        """Waits until the template is compiled. Raises ApiError 503 if it is not: it compiled in the first process, or
        there would be no server."""
        if self._ready[number]:
            return
        reply = Refused(f"the chat template does not compile within {self._limits.seconds:g} s")
        process, limits = self._processes[number], self._limits
        try:
            process.receive(lambda seconds: seconds >= limits.start_seconds)  # Started
            reply = self._decoder.decode(process.receive(lambda seconds: seconds >= limits.seconds))
        except ProcessEnded as error:
            if not error.is_late:
                reply = Refused("the chat template ends the process that compiles it")
        if not isinstance(reply, Compiled):
            process.kill()
            self._start(number)
            raise ApiError(503, reply.message if isinstance(reply, Refused) else "the chat template is not ready")
        self._ready[number], self._rules = True, reply.rules


_OVERHEAD = 1 << 16
"""Bytes of a conversation that are not its text."""


def _fields(body: ChatCompletionRequest) -> dict[str, Any]:
    """Returns the fields of a request that the template gets, without the data of images and videos."""
    fields = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    fields["messages"] = [_without_media(message) for message in body.messages]
    if body.response_format is not None:
        fields["response_format"] = msgspec.to_builtins(body.response_format)
    if body.tool_choice == "none":
        fields.pop("tools", None)
    return fields


def _without_media(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or not any(media_kind(part) for part in content):
        return message
    return {**message, "content": [{"type": part["type"]} if media_kind(part) else part for part in content]}
