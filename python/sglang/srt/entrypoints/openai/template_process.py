"""Main of a process that renders conversations: compiles the model's template, then does one job after another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.chat_template import ChatTemplate, ConversationTooLong
from sglang.srt.entrypoints.openai.message_order import MessageRules
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.errors import UserError
from sglang.srt.managers.front.job_process import begin_jobs
from sglang.srt.utils.free_memory import trim_allocator
from sglang.srt.utils.process_limits import limit_memory

WORKING_BYTES = 1 << 30
"""Memory that a template may take beyond that of the idle process."""


LARGE_JOB_BYTES = 1 << 18
"""Size of a conversation after which memory kept by the C library is returned to the system."""


class TemplateSource(NamedTuple):
    """Arguments of a ChatTemplate."""

    source: str | dict[str, str] | None
    special_tokens: dict[str, str]
    defaults: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Returns the text of all templates."""
        if isinstance(self.source, dict):
            return "\n".join(self.source.values())
        return self.source or ""


class Probe(NamedTuple):
    """Arguments of `ChatTemplate.render_probe`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool


class Started(msgspec.Struct, tag=True):
    """First message, before the template is read."""


class Compiled(msgspec.Struct, tag=True):
    """Second message, unless the template is refused. Has the rules of conversations without and with tools."""

    rules: tuple[MessageRules, MessageRules]


class Rendered(msgspec.Struct, tag=True):
    """The texts of a job's conversations, in order."""

    texts: list[str]


class Refused(msgspec.Struct, tag=True):
    """A refusal. `too_long`: the conversation does not fit this context length, whatever the template."""

    message: str
    param: str | None = None
    too_long: bool = False


Reply = Started | Compiled | Rendered | Refused


def run_templates(source: TemplateSource, max_chars: int, working_bytes: int, connection: Connection) -> None:
    """Runs the process. Jobs come from `packed`: a list of fields of ChatCompletionRequests, or the fields of a Probe
    by name."""
    begin_jobs()
    with suppress(EOFError, OSError):  # the front is gone
        _send(connection, Started())
        limit_memory(working_bytes)
        try:
            template = ChatTemplate(*source, max_chars=max_chars)
        except (UserError, MemoryError) as error:
            return _send(connection, Refused(str(error) or "the chat template takes too much memory to compile"))
        _send(connection, Compiled((template.message_rules(None), template.message_rules([{}]))))
        while True:
            message = connection.recv_bytes()
            _send(connection, _answer(template, json.loads(message.decode("utf-8", "surrogatepass"))))
            if len(message) > LARGE_JOB_BYTES:
                trim_allocator()
            del message


def packed(job: list[dict[str, Any]] | Probe) -> bytes:
    """Returns a message of plain values, including integers of any size and lone surrogates. Does not memoize objects:
    the memory for 300,000 of them would stay with the thread."""
    values = job._asdict() if isinstance(job, Probe) else job
    return json.dumps(values, ensure_ascii=False, check_circular=False).encode("utf-8", "surrogatepass")


def _answer(template: ChatTemplate, job: list[dict[str, Any]] | dict[str, Any]) -> Reply:
    try:
        if isinstance(job, dict):
            return Rendered([template.render_probe(**job)])
        return Rendered([template.render(msgspec.convert(fields, ChatCompletionRequest)) for fields in job])
    except ApiError as error:
        return Refused(error.message, error.param, isinstance(error, ConversationTooLong))
    except (ValueError, MemoryError) as error:
        return Refused(str(error) or "the chat template takes too much memory", "messages")


def _send(connection: Connection, reply: Reply) -> None:
    try:
        message = msgspec.msgpack.encode(reply)
    except UnicodeEncodeError:
        message = msgspec.msgpack.encode(
            Refused("The conversation holds half of a surrogate pair, which is no character.", "messages")
        )
    connection.send_bytes(message)
