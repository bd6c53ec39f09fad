"""A streamed message: named server-sent events, with one content block open at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.entrypoints.anthropic import message_parts as parts
from sglang.srt.entrypoints.anthropic.hidden_thoughts import signature_of
from sglang.srt.entrypoints.openai.chat_output import ChatFormats, ChoiceOutput
from sglang.srt.function_call.events import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.wire.io_struct import TokenMeta


def _sse(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


class MessageStream:
    """Writes the events of one answer. `shows_thoughts`: thoughts are text, otherwise a signature. `new_message`: the
    message at its beginning, with its usage. `context`: the report on edits of the conversation for the end."""

    def __init__(
        self,
        rules: parts.EndingRules,
        shows_thoughts: bool,
        formats: ChatFormats,
        output: ChoiceOutput,
        new_message: Callable[[TokenMeta], dict[str, Any]],
        usage: Callable[[TokenMeta], dict[str, Any]],
        context: dict[str, Any],
    ) -> None:
        self._formats = formats
        self._output = output
        self._new_message = new_message
        self._usage = usage
        self._rules = rules
        self._shows_thoughts = shows_thoughts
        self._context = context
        self._hidden: list[str] = []
        """The thoughts of the block that is open."""
        self._begun = False
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the block that is open."""
        self._has_calls = False

    def write(self, output: GenerateOutput) -> bytes:
        """Returns the events of a further part of the output."""
        pieces = self._output.push(output)
        events = []
        if not self._begun:
            self._begun = True
            events += [_sse("message_start", message=self._new_message(output.meta)), _sse("ping")]
        events += map(self._piece, pieces)
        if output.finish is not None:
            delta = self._rules.ending(output.finish, self._has_calls, output.meta)
            events.append(self._close())
            events.append(_sse("message_delta", delta=delta, usage=self._usage(output.meta), **self._context))
            events.append(_sse("message_stop"))
        return b"".join(events)

    def num_held(self, index: int) -> int:
        return self._output.num_held

    def end(self) -> bytes:
        """Returns no bytes: the last part of the output has ended the message."""
        return b""

    def _piece(self, piece: Event) -> bytes:
        match piece:
            case TextDelta(text):
                return self._within(parts.text_block()) + self._delta(type="text_delta", text=text)
            case ReasoningDelta(text):
                return self._within(parts.thinking_block()) + self._thoughts(text)
            case CallStart(call, name):
                self._has_calls = True
                call_id = self._formats.call_id(name, call, parts.CALL_ID_PREFIX)
                return self._start(parts.tool_use_block(call_id, name))
            case ArgumentsDelta(_, text):
                return self._delta(type="input_json_delta", partial_json=text)
            case CallEnd():
                return self._close()

    def _thoughts(self, text: str) -> bytes:
        if self._shows_thoughts:
            return self._delta(type="thinking_delta", thinking=text)
        self._hidden.append(text)
        return b""

    def _within(self, block: dict[str, Any]) -> bytes:
        """Opens the block unless one of its type is open. Returns the events."""
        return b"" if self._open == block["type"] else self._start(block)

    def _start(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = block["type"]
        return closed + _sse("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return _sse("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._hidden:
            signed = self._delta(type="signature_delta", signature=signature_of("".join(self._hidden)))
            self._hidden = []
        self._open = None
        self._num_blocks += 1
        return signed + _sse("content_block_stop", index=self._num_blocks - 1)
