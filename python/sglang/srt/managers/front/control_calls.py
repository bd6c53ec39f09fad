"""Control calls to the schedulers of several replicas, which must have done the same at the end."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.replica import Replica
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq

logger = logging.getLogger(__name__)


class Undo(NamedTuple):
    """The call that undoes another one."""

    kind: str
    args: dict[str, Any]


class Replies(NamedTuple):
    """The answers to a control call."""

    by_replica: dict[Replica, ControlReply]
    """Without replicas that ended meanwhile."""
    late: list[Replica]
    """Replicas that have not answered in time."""

    @property
    def refused(self) -> list[Replica]:
        """Returns the replicas that refused."""
        return [replica for replica, reply in self.by_replica.items() if not reply.ok]


async def ask_each(asked: Sequence[Replica], kind: str, args: dict[str, Any], timeout: float) -> Replies:
    """Asks the schedulers of these replicas (at least one) at the same time. Raises RequestError if all of them end
    meanwhile, or if the only one cannot be asked."""
    message = ControlReq(uuid.uuid4().hex, kind, args)
    calls: dict[Replica, asyncio.Future[ControlReply]] = {}
    try:
        for replica in asked:
            try:
                calls[replica] = replica.ask(message)
            except RequestError as error:
                if len(asked) == 1:
                    raise
                calls[replica] = asyncio.get_running_loop().create_future()
                calls[replica].set_result(ControlReply(message.id, False, error.message))
        await asyncio.wait(calls.values(), timeout=timeout)
        late = [replica for replica, call in calls.items() if not call.done()]
    finally:
        for call in calls.values():
            call.cancel()  # cancels the calls without an answer
    failures = {replica: call.exception() for replica, call in calls.items() if replica not in late}
    if len(failures) == len(calls) and None not in failures.values():
        raise next(failure for failure in failures.values() if failure is not None)
    return Replies({replica: calls[replica].result() for replica, failure in failures.items() if failure is None}, late)


async def undo_where_done(undo: Undo, replies: Replies, timeout: float) -> None:
    """Undoes a call that some replicas have followed and others have not. One that is late may still follow the call;
    it gets the undoing one after it. Logs where that fails, as in a replica that has got requests meanwhile."""
    done = [replica for replica, reply in replies.by_replica.items() if reply.ok]
    if done and (replies.refused or replies.late):
        where = [replica for replica in (*done, *replies.late) if replica.failure is None]
        undone = await ask_each(where, undo.kind, undo.args, timeout)
        for replica in (*undone.refused, *undone.late):
            reply = undone.by_replica.get(replica)
            logger.warning(
                "Replica %d has not done %s, which undoes a call that other replicas have not followed (%s): make the"
                " call again when nothing runs.",
                replica.index, undo.kind, "no answer" if reply is None else reply.message,
            )  # fmt: skip


def late_error(kind: str, timeout: float) -> RequestError:
    """Returns the error for a call that was not answered in time."""
    return RequestError(f"The scheduler did not answer {kind} within {timeout:g} seconds.", 503)
