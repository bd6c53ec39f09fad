"""Record of a sequence that has ended, for the metrics, the log and the traces."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta


class EndedRequest(NamedTuple):
    """A sequence that has ended. Times are those of `time.monotonic()`, a clock that all processes of a machine share;
    0: it never got that far."""

    request: TokenizedGenerateReq
    meta: TokenMeta
    finish: FinishReason
    text: str
    """Beginning of the output, as long as the log needs it."""
    trace_parent: Any
    """Value that `RequestTracer.parent` returned when the call came in."""
    created_time: float
    sent_time: float
    first_token_time: float
    end_time: float

    @property
    def started_time(self) -> float:
        """Returns the time when its first step was chosen."""
        return self.meta.started_time

    @property
    def seconds(self) -> float:
        """Returns the seconds from arrival to the end."""
        return self.end_time - self.created_time

    @property
    def queue_seconds(self) -> float | None:
        """Returns the seconds from arrival to the first step; None if none was chosen."""
        return self.started_time - self.created_time if self.started_time else None
