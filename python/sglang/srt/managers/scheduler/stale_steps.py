"""Steps that read a cached prefix which a load then did not bring: what they computed does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier import MOST_LOADS

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.schedule_batch import Req, ScheduleBatch


def redo_stale(scheduler: Any, batch: ScheduleBatch | None = None) -> None:
    """Lets launched steps forget the requests that read what failed loads were to bring, and sends these back to the
    queue as they came. scheduler: a `Scheduler`, whose module imports this one; batch: a step that is being read
    back."""
    assert scheduler.host_tier is not None
    wrong = scheduler.host_tier.wrong_nodes()
    if not wrong:
        return
    path = scheduler.kv.tree.path
    stale = [
        req
        for req in scheduler.reqs.values()
        if req.slot and req.node is not None and not wrong.isdisjoint(path(req.node))
    ]
    for launched in (*scheduler.in_flight, batch, scheduler.launching):
        if launched is not None:
            launched.stale.update(stale)
    for req in reversed(stale):
        _requeue(scheduler, req)
    scheduler.host_tier.forget_wrong()


def _requeue(scheduler: Any, req: Req) -> None:
    """Gives up a request's slots without keeping what it computed. It is not loaded for again."""
    if req in scheduler.chunked:
        scheduler.chunked.remove(req)
    scheduler.running.remove(req)
    scheduler.runner.sampling_table.clear(req.slot)
    scheduler.media.end(req)
    req.drop_draft_tokens()
    scheduler.kv.release(req, keep=False)
    req.num_loads, req.num_loaded = MOST_LOADS, 0
    req.admitted = req.admitted and req.num_retractions > 0
    scheduler.waiting.appendleft(req)
