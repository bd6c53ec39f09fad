"""Answers in Ollama's form: JSON lines, the last of which has the counts and times."""

from __future__ import annotations

import datetime
import time
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.chat_output import ChoiceOutput
from sglang.srt.function_call.events import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from sglang.srt.managers.front.generate_request import GenerateOutput, refuse_aborted
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta


def now() -> str:
    """Returns the present time in ISO format."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")


class AnswerWriter:
    """Writes the lines of one answer, to a chat (`in_message`) or to a prompt."""

    def __init__(self, model: str, output: ChoiceOutput, in_message: bool) -> None:
        self._model = model
        self._output = output
        self._in_message = in_message
        self._call_name = ""
        self._arguments: list[str] = []
        self._created = time.perf_counter_ns()
        self._first: int | None = None
        """Time when the first output came."""

    def write(self, output: GenerateOutput) -> bytes:
        """Returns the lines of a further part of the output."""
        lines = [self._line(piece) for piece in self._pieces(output)]
        if output.finish is not None:
            lines.append(self._line({}, **self._ending(output.finish, output.meta)))
        return b"".join(lines)

    def num_held(self, index: int) -> int:
        return self._output.num_held

    def end(self) -> bytes:
        """Returns no bytes: the last line has ended the answer."""
        return b""

    async def whole(self, outputs: GenerationStream) -> dict[str, Any]:
        """Returns the whole answer as one object."""
        pieces = []
        async for output in outputs:
            pieces += self._pieces(output)
        assert output.finish is not None
        fields: dict[str, Any] = {}
        for name in ("content", "thinking"):
            if text := "".join(piece.get(name, "") for piece in pieces):
                fields[name] = text
        if calls := [call for piece in pieces for call in piece.get("tool_calls", ())]:
            fields["tool_calls"] = calls
        return self._fields(fields) | self._ending(output.finish, output.meta)

    def _pieces(self, output: GenerateOutput) -> list[dict[str, Any]]:
        if self._first is None:
            self._first = time.perf_counter_ns()
        return [piece for event in self._output.push(output) if (piece := self._piece(event))]

    def _piece(self, event: Event) -> dict[str, Any]:
        """Returns the part of a line for an event; calls come whole, broken ones as text."""
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"thinking": text}
            case CallStart(_, name):
                self._call_name, self._arguments = name, []
            case ArgumentsDelta(_, text):
                self._arguments.append(text)
            case CallEnd(_, complete, source):
                if not complete:
                    return {"content": source}
                arguments = msgspec.Raw("".join(self._arguments).encode())
                return {"tool_calls": [{"function": {"name": self._call_name, "arguments": arguments}}]}
        return {}

    def _fields(self, piece: dict[str, Any]) -> dict[str, Any]:
        head = {"model": self._model, "created_at": now()}
        if self._in_message:
            return head | {"message": {"role": "assistant", "content": "", **piece}}
        renamed = {"response" if name == "content" else name: value for name, value in piece.items()}
        return head | {"response": "", **renamed}

    def _line(self, piece: dict[str, Any], done: bool = False, **ending: Any) -> bytes:
        return msgspec.json.encode(self._fields(piece) | {"done": done, **ending}) + b"\n"

    def _ending(self, finish: FinishReason, meta: TokenMeta) -> dict[str, Any]:
        """Returns the fields of the last line. Raises RequestError 503 for an aborted answer."""
        refuse_aborted(finish)
        assert self._first is not None
        end = time.perf_counter_ns()
        return {
            "done": True,
            "done_reason": finish.type,
            "total_duration": end - self._created,
            "load_duration": 0,
            "prompt_eval_count": meta.prompt_tokens,
            "prompt_eval_duration": self._first - self._created,
            "eval_count": meta.completion_tokens,
            "eval_duration": end - self._first,
        }
