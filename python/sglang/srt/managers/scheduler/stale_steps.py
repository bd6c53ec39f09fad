"""Recomputation of requests whose steps read a cached prefix that a load then failed to bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier import MAX_LOADS

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.schedule_batch import Req, ScheduleBatch


def redo_stale(scheduler: Any, batch: ScheduleBatch | None = None) -> None:
    """Sends the requests that read the entries of failed loads back to the queue, and marks them stale in launched
    steps, whose results then do not count for them. scheduler: a `Scheduler` (whose module imports this one); batch: a
    step that is being read back."""
    assert scheduler.host_tier is not None
    wrong = scheduler.host_tier.wrong_nodes()
    if not wrong:
        return
    stale = [req for req in scheduler.reqs.values() if req.slot and req.node in wrong]
    for launched in (*scheduler.in_flight, batch, scheduler.launching):
        if launched is not None:
            launched.stale.update(stale)
    scheduler.running.remove(stale)
    gone = set(stale)
    scheduler.chunked = [req for req in scheduler.chunked if req not in gone]
    for req in reversed(stale):
        _requeue(scheduler, req)
    scheduler.host_tier.forget_wrong()


def _requeue(scheduler: Any, req: Req) -> None:
    """Gives up a request's slots and discards what it computed. No further load is begun for it."""
    scheduler.runner.sampling_table.clear(req.slot)
    scheduler.media.end(req)
    req.drop_draft_tokens()
    scheduler.kv.release(req, keep=False)
    req.num_loads, req.num_loaded = MAX_LOADS, 0
    req.admitted = req.admitted and req.num_retractions > 0
    scheduler.waiting.appendleft(req)
