"""Server-sent events of a streamed choice, assembled from parts that are encoded once a request."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.encode
_NULL = b"null"


class ChunkWriter:
    """Writes the events of one request.

    `object_name` is `chat.completion.chunk` or `text_completion`; every event shares id, creation time and model.
    """

    def __init__(self, object_name: str, response_id: str, created: int, model: str) -> None:
        fields = {"id": response_id, "object": object_name, "created": created, "model": model}
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":['

    def totals(self, usage: dict[str, Any] | None, extension: dict[str, Any] | None = None) -> bytes:
        """Returns the final event, which has the requested totals and no choice; empty if none were requested."""
        if usage is None and extension is None:
            return b""
        tail = b"" if extension is None else b',"sglext":' + encode(extension)
        return self._head + b'],"usage":' + encode(usage) + tail + b"}\n\n"

    def _event(self, index: int, payload: bytes, logprobs: bytes, finish: bytes, usage: bytes) -> bytes:
        return b"".join(
            (
                self._head,
                b'{"index":%d,' % index,
                payload,
                b',"logprobs":',
                logprobs,
                finish,
                b'}],"usage":',
                usage,
                b"}\n\n",
            )
        )


_RUNNING = b',"finish_reason":null,"matched_stop":null'


def finish_fields(reason: str, matched: int | str | None) -> bytes:
    """Returns the last fields of a choice that ended."""
    return b',"finish_reason":' + encode(reason) + b',"matched_stop":' + encode(matched)


class ChatChunks(ChunkWriter):
    """Writes chunks of a chat. For each choice call `role`, then `text`, `reasoning`, `call` and `arguments` for the
    pieces, then `finish`."""

    def __init__(self, response_id: str, created: int, model: str) -> None:
        super().__init__("chat.completion.chunk", response_id, created, model)

    def role(self, index: int, usage: bytes = _NULL) -> bytes:
        """Returns the first event of a choice."""
        delta = b'"delta":{"role":"assistant","content":"","reasoning_content":null}'
        return self._event(index, delta, _NULL, _RUNNING, usage)

    def text(self, index: int, text: str, logprobs: bytes = _NULL, usage: bytes = _NULL) -> bytes:
        """Returns an event with text of the answer. logprobs, usage: JSON."""
        delta = b'"delta":{"content":' + encode(text) + b',"reasoning_content":null}'
        return self._event(index, delta, logprobs, _RUNNING, usage)

    def reasoning(self, index: int, text: str, logprobs: bytes = _NULL, usage: bytes = _NULL) -> bytes:
        """Returns an event with text of thoughts. logprobs, usage: JSON."""
        delta = b'"delta":{"content":null,"reasoning_content":' + encode(text) + b"}"
        return self._event(index, delta, logprobs, _RUNNING, usage)

    def call(
        self, index: int, number: int, call_id: str, name: str, logprobs: bytes = _NULL, usage: bytes = _NULL
    ) -> bytes:
        """Returns the event that starts a function call; `number` counts the calls of the choice."""
        function = {"name": name, "arguments": ""}
        call = {"index": number, "id": call_id, "type": "function", "function": function}
        return self._tool_calls(index, call, logprobs, usage)

    def arguments(self, index: int, number: int, text: str, logprobs: bytes = _NULL, usage: bytes = _NULL) -> bytes:
        """Returns an event with text of a call's arguments. number: of the call in the choice."""
        return self._tool_calls(index, {"index": number, "function": {"arguments": text}}, logprobs, usage)

    def _tool_calls(self, index: int, call: dict[str, Any], logprobs: bytes, usage: bytes) -> bytes:
        delta = b'"delta":{"content":null,"reasoning_content":null,"tool_calls":[' + encode(call) + b"]}"
        return self._event(index, delta, logprobs, _RUNNING, usage)

    def finish(self, index: int, reason: str, matched: int | str | None, usage: bytes = _NULL) -> bytes:
        """Returns the last event of a choice. matched: the stop string or token that ended it."""
        delta = b'"delta":{"content":null,"reasoning_content":null}'
        return self._event(index, delta, _NULL, finish_fields(reason, matched), usage)


class CompletionChunks(ChunkWriter):
    """Writes chunks of a completion. For each choice call `text` for each piece, the last one with its finish
    reason."""

    def __init__(self, response_id: str, created: int, model: str) -> None:
        super().__init__("text_completion", response_id, created, model)

    def text(
        self, index: int, text: str, logprobs: bytes = _NULL, usage: bytes = _NULL, finish: bytes = _RUNNING
    ) -> bytes:
        """Returns an event with text. logprobs, usage and finish: JSON."""
        return self._event(index, b'"text":' + encode(text), logprobs, finish, usage)
