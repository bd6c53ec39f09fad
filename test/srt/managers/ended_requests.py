"""Requests that have ended, for the tests of what observes them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from sglang.srt.managers.front.request_record import EndedRequest
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling.sampling_params import SamplingParams


def request(rid: str = "r", **params: Any) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(
        rid=rid, input_ids=np.array([1, 2, 3], np.int32), sampling_params=SamplingParams(**params)
    )


def ended(
    req: TokenizedGenerateReq | None = None,
    *,
    text: str = "",
    finish: FinishReason | None = None,
    times: tuple[float, float, float, float, float] = (1.0, 1.5, 3.0, 4.0, 9.0),
    trace_parent: Any = None,
) -> EndedRequest:
    """`times`: arrival, sent to the scheduler, first step, first token, end, in seconds; 0: never."""
    origin = time.monotonic() - 100.0
    created, sent, started, first, end = (origin + t if t else 0.0 for t in times)
    return EndedRequest(
        request=req or request(),
        meta=TokenMeta(3, 7, 1, started_time=started),
        finish=finish or FinishReason("stop"),
        text=text,
        trace_parent=trace_parent,
        created_time=created,
        sent_time=sent,
        first_token_time=first,
        end_time=end,
    )
