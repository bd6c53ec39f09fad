"""The log lines of `--log-requests`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SHORT_TEXT = 256


class RequestLog:
    """Writes what `--log-requests-level` asks for: 0 ids and counts, 1 parameters too, 2 the beginning of the prompt
    too, 3 all of it."""

    def __init__(self, args: ServerArgs) -> None:
        self._level = args.log_requests_level

    def received(self, request: TokenizedGenerateReq, prompt_text: str | None) -> None:
        fields: dict[str, Any] = {"rid": request.rid, "prompt_tokens": len(request.input_ids)}
        if self._level >= 1:
            fields["sampling_params"] = msgspec.to_builtins(request.sampling_params)
        if self._level >= 2:
            prompt = request.input_ids if prompt_text is None else prompt_text
            fields["prompt"] = prompt if self._level >= 3 else prompt[:SHORT_TEXT]
        logger.info("Received: %s", fields)

    def finished(self, rid: str, seconds: float, meta: TokenMeta, finish: FinishReason) -> None:
        logger.info(
            "Finished: rid=%s, prompt tokens=%d, cached=%d, completion tokens=%d, seconds=%.3f, reason=%s",
            rid,
            meta.prompt_tokens,
            meta.cached_tokens,
            meta.completion_tokens,
            seconds,
            finish.type if finish.message is None else f"{finish.type}: {finish.message}",
        )
