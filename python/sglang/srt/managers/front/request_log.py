"""The log lines of `--log-requests`.

`--log-requests-level` says what of a request they hold:

0. ids, counts and the reason of the end;
1. parameters too, with the length of texts that the client wrote (patterns, schemas) in their place;
2. the beginning of prompt, output and such texts too, without what looks like a credential;
3. all of it, as it came.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from sglang.srt.managers.front.request_record import EndedRequest
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SHORT_TEXT = 256
_LOOKED_AT = 2 * SHORT_TEXT
"""Characters that are searched for credentials, so that one cut in half by the limit is found too."""
_CREDENTIAL = re.compile(
    r"\b(?:sk|pk|rk|ghp|gho|ghs|github_pat|glpat|hf|xox[abps])[-_][\w-]{12,}"
    r"|\bAKIA[A-Z0-9]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.?[\w-]*"
    r"|(?i:\bbearer\s+)[\w.~+/=-]{12,}"
)
REDACTED = "[credential]"
_CLIENT_TEXTS = ("stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters with texts of the client."""


class RequestLog:
    """Writes a log line when a request arrives and one when it ends."""

    def __init__(self, args: ServerArgs) -> None:
        self._level = args.log_requests_level
        self.kept_chars = (0, 0, _LOOKED_AT, float("inf"))[self._level]
        """Number of characters of an output that `finished` wants."""

    def received(self, request: TokenizedGenerateReq, prompt_text: str | None) -> None:
        """Logs an accepted sequence; how much of it depends on --log-requests-level."""
        fields: dict[str, Any] = {"rid": request.rid, "prompt_tokens": len(request.input_ids)}
        if self._level >= 1:
            fields["sampling_params"] = self._parameters(request)
        if self._level >= 2:
            fields["prompt"] = self._shown(request.input_ids.tolist() if prompt_text is None else prompt_text)
        logger.info("Received: %s", fields)

    def finished(self, ended: EndedRequest) -> None:
        rid, meta, finish = ended.request.rid, ended.meta, ended.finish
        line = "Finished: rid=%s, prompt tokens=%d, cached=%d, completion tokens=%d, seconds=%.3f, reason=%s"
        reason = finish.type if finish.message is None else f"{finish.type}: {finish.message}"
        values = [
            rid if rid.isprintable() else repr(rid),
            meta.prompt_tokens,
            meta.cached_tokens,
            meta.completion_tokens,
            ended.seconds,
            reason,
        ]
        if self._level >= 2:
            line += ", output=%r"
            values.append(self._shown(ended.text))
        logger.info(line, *values)

    def _parameters(self, request: TokenizedGenerateReq) -> dict[str, Any]:
        parameters: dict[str, Any] = msgspec.to_builtins(request.sampling_params)
        for name in _CLIENT_TEXTS:
            if name in parameters:
                parameters[name] = self._client_text(parameters[name])
        return parameters

    def _client_text(self, value: str | list[str]) -> Any:
        if isinstance(value, list):
            return [self._client_text(text) for text in value]
        return f"<{len(value)} characters>" if self._level < 2 else self._shown(value)

    def _shown(self, text: str | list[int]) -> str | list[int]:
        if self._level >= 3:
            return text
        if isinstance(text, list):
            return text[:SHORT_TEXT]
        return _CREDENTIAL.sub(REDACTED, text[:_LOOKED_AT])[:SHORT_TEXT]
