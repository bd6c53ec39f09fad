"""Parts of an answer that whole messages and streams share: content blocks, usage, stop reason."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sglang.srt.entrypoints.anthropic.hidden_thoughts import signature_of
from sglang.srt.managers.front.generate_request import refuse_aborted
from sglang.srt.managers.wire.io_struct import FinishReason, TokenMeta

CALL_ID_PREFIX = "toolu_"


def text_block(text: str = "") -> dict[str, Any]:
    """Returns a block of text as Anthropic's API has it."""
    return {"type": "text", "text": text}


def thinking_block(thinking: str = "", hidden: bool = False) -> dict[str, Any]:
    """Returns a block of thoughts. They are not signed: they come back as text, and the model may read them. `hidden`:
    the block's signature carries them instead of its text."""
    shown, signature = ("", signature_of(thinking)) if hidden and thinking else (thinking, "")
    return {"type": "thinking", "thinking": shown, "signature": signature}


def tool_use_block(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    """Returns a block of a call. `arguments`: a JSON object, kept as the model wrote it."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": msgspec.Raw(arguments.encode())}


def message(message_id: str, model: str, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """Returns a message that has not ended."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def usage(meta: TokenMeta, reports_cached: bool) -> dict[str, Any]:
    """Returns token counts. `input_tokens` leaves out cached tokens if the server reports them."""
    cached = meta.cached_tokens if reports_cached else 0
    return {
        "input_tokens": meta.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": meta.completion_tokens,
        "output_tokens_details": {"thinking_tokens": meta.reasoning_tokens},
    }


class EndingRules(NamedTuple):
    """Fields of a request on which the stop reason of its answer depends."""

    max_tokens: int
    stop_sequences: list[str] | None

    def ending(self, finish: FinishReason, has_calls: bool, meta: TokenMeta) -> dict[str, Any]:
        """Returns `stop_reason` and `stop_sequence`. Raises RequestError 503 for an aborted answer, which has none."""
        return ending(finish, has_calls, self.stop_sequences, meta.completion_tokens < self.max_tokens)


def ending(
    finish: FinishReason, has_calls: bool, stop_sequences: list[str] | None, room_left: bool = False
) -> dict[str, Any]:
    """Returns `stop_reason` and `stop_sequence`. `room_left`: `max_tokens` was not reached. Raises RequestError 503 for
    an aborted answer, which has none."""
    refuse_aborted(finish)
    if finish.type == "stop" and finish.matched in (stop_sequences or ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
    reason = "tool_use" if has_calls else "end_turn"
    if finish.type == "length":
        reason = "model_context_window_exceeded" if room_left else "max_tokens"
    return {"stop_reason": reason, "stop_sequence": None}
