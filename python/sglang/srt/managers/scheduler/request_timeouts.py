"""Time limits of waiting and running requests: `SGLANG_REQ_WAITING_TIMEOUT` and `SGLANG_REQ_RUNNING_TIMEOUT`.

One rank decides, because a clock is involved: it turns overdue requests into abort messages, which reach all ranks like
those of clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.managers.wire.io_struct import AbortReq

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
    from sglang.srt.managers.scheduler.schedule_batch import Req
    from sglang.srt.managers.scheduler.scheduler import Scheduler

CHECK_INTERVAL_S = 0.1
SERVICE_UNAVAILABLE = 503


class RequestTimeouts:
    """Limits in seconds; zero or less means no limit."""

    def __init__(self, waiting_s: float, running_s: float) -> None:
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._next_check = 0.0

    @classmethod
    def from_environment(cls) -> RequestTimeouts:
        """Returns the limits that the SGLANG_REQ_*_TIMEOUT variables set."""
        return cls(envs.SGLANG_REQ_WAITING_TIMEOUT, envs.SGLANG_REQ_RUNNING_TIMEOUT)

    @property
    def enabled(self) -> bool:
        """Returns whether there is any limit."""
        return self._waiting_s > 0 or self._running_s > 0

    def overdue(self, scheduler: Scheduler | AttentionGroups) -> list[AbortReq]:
        """Returns messages that abort overdue requests. Looks at requests only when the oldest one may be overdue, and
        at most a few times a second."""
        now = time.monotonic()
        if not self.enabled or now < self._next_check:
            return []
        aborts, due = [], [now + limit for limit in (self._waiting_s, self._running_s) if limit > 0]
        if self._waiting_s > 0:
            queued = [*scheduler.waiting, *(req for req, _ in scheduler.compiling.values())]
            aborts.append(_abort((r for r in queued if now - r.queued_time > self._waiting_s), "waiting"))
            due += [r.queued_time + self._waiting_s for r in queued]
        if self._running_s > 0:
            started = [r for r in scheduler.reqs.values() if r.started_time]
            aborts.append(_abort((r for r in started if r.slot and now - r.started_time > self._running_s), "running"))
            due += [r.started_time + self._running_s for r in started]
        self._next_check = max(now + CHECK_INTERVAL_S, min(due))
        return [abort for abort in aborts if abort.rids]


def _abort(reqs: Iterable[Req], state: str) -> AbortReq:
    return AbortReq(
        [req.rid for req in reqs], message=f"Request {state} timeout reached.", status_code=SERVICE_UNAVAILABLE
    )
