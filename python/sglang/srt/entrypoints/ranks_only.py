"""Runs the ranks of a machine on which clients are not answered (--node-rank above 0)."""

from __future__ import annotations

import logging
import sys
import threading

from sglang.srt.entrypoints.exit_guard import ExitGuard
from sglang.srt.managers.engine_processes import EngineError
from sglang.srt.managers.launch import launch_engine
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
ENGINE_DIED = 1
PROCESSES_END_S = 1.5
"""Seconds for the ranks to end by themselves, before they are killed."""


def run_ranks(args: ServerArgs) -> None:
    """Runs this machine's ranks until a signal comes, or until a rank ends (which happens when those of other machines
    do): then exits with status 1. Raises UserError if they cannot start for a reason that the user can correct."""
    stop = threading.Event()
    guard = ExitGuard(stop.set)
    failures: list[str] = []

    def report(replica: int, message: str) -> None:
        guard.end_within(guard.limit_s)
        failures.append(message)
        stop.set()

    handle = launch_engine(args)
    try:
        handle.watch(report)
        logger.info("The ranks of machine %d of %d start; machine 0 answers.", args.node_rank, args.nnodes)
        stop.wait()
        if failures:
            handle.wait_ready()  # raises the reason if they never became ready
    except EngineError as error:
        failures.append(str(error))
    finally:
        guard.end_within(guard.limit_s)
        handle.shutdown(PROCESSES_END_S)
    if failures:
        logger.error("This machine's ranks have ended, as all do when one does: %s", failures[0])
        sys.exit(ENGINE_DIED)
