"""The processes of a replica: its ranks on one machine, and the detokenizer where clients are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang.srt.errors import UserError
from sglang.srt.managers.engine_processes import EngineError, EngineProcesses
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.plan.layout import asked_node
from sglang.srt.server_args import ServerArgs

SCHEDULER_ENTRY = "sglang.srt.managers.scheduler.scheduler_process:run_scheduler"
"""`module:function(args, ports, rank, start_pipe)`; imported by the child only."""
DETOKENIZER_ENTRY = "sglang.srt.managers.detokenizer.detokenizer_manager:run_detokenizer"


class ReplicaProcesses(Protocol):
    """The processes of a replica, wherever they run. They fail together."""

    failure: UserError | EngineError | None
    """Why the processes have ended."""
    ready: bool

    @property
    def process_ids(self) -> dict[str, int | None]:
        """Returns the ids of the processes on this machine, by name."""

    def watch(self) -> None:
        """Begins to watch the processes; call it once, after all are started."""

    def tell_end(self, limit_s: float) -> None:
        """Tells all processes to end within `limit_s` seconds, without waiting. May be repeated."""

    def end(self, limit_s: float) -> None:
        """Ends all processes; kills those that are not gone after `limit_s` seconds. May be repeated."""


def start_processes(
    args: ServerArgs,
    ports: Ports,
    name: str,
    on_change: Callable[[], None],
    scheduler_entry: str = SCHEDULER_ENTRY,
) -> EngineProcesses:
    """Starts the processes of one replica that run on this machine. name: the replica's, empty if there is only one;
    `on_change`: as for EngineProcesses."""
    replica = EngineProcesses(args.watchdog_timeout, on_change)
    node = asked_node(args)
    try:
        for rank in node.ranks:
            rank_name = "" if node.layout.world_size == 1 else node.layout.name(rank)
            replica.spawn(" ".join(filter(None, ("scheduler", name, rank_name))), scheduler_entry, (args, ports, rank))
        if node.answers:
            replica.spawn(" ".join(filter(None, ("detokenizer", name))), DETOKENIZER_ENTRY, (args, ports, 0))
    except BaseException:
        replica.end(0.0)
        raise
    return replica
