"""A replica whose processes run on nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from sglang.srt.errors import UserError
from sglang.srt.managers.engine_processes import EngineError, lateness
from sglang.srt.managers.ray_cluster.machine import Failure

logger = logging.getLogger(__name__)

POLL_S = 1.0
OTHERS_S, NODE_S = 2.0, 10.0
"""Seconds for other machines to report after one has failed: for the rest of them, and for Ray's report of a lost node
if the only known failures are ranks' lost connections."""
KILL_S = 1.5
"""Seconds that an actor may need beyond the time limit of its processes. Replicas are told at the same time, so this
passes once, and before `entrypoints.exit_guard` ends the program. Processes of an actor that is killed end with it."""


class PlacedReplica:
    """The actors of a replica's machines, which fail together. Implements `replica_processes.ReplicaProcesses`."""

    def __init__(
        self, machines: Sequence[Any], addresses: Sequence[str], calls: Sequence[Any], on_change: Callable[[], None]
    ) -> None:
        """calls: arguments of each machine's `Machine.start`."""
        self.failure: UserError | EngineError | None = None
        self.ready = False
        self._machines, self._addresses, self._calls = machines, addresses, calls
        self._on_change = on_change
        self._closing = self._ended = False
        self._ends: list[Any] = []
        """What the actors return once their processes have ended."""
        self._end_by = float("inf")
        """time.monotonic() at which the actors are killed."""
        self._end_lock = threading.Lock()

    @property
    def process_ids(self) -> dict[str, int | None]:
        return {}

    def watch(self) -> None:
        for machine, call in zip(self._machines, self._calls, strict=True):
            machine.start.remote(*call)
        threading.Thread(target=self._watch_machines, name="ray-monitor", daemon=True).start()

    def tell_end(self, limit_s: float) -> None:
        with self._end_lock:
            self._tell_end(limit_s)

    def _tell_end(self, limit_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        self._end_by = time.monotonic() + limit_s + KILL_S
        with contextlib.suppress(Exception):  # an actor, its node or the cluster may be gone
            self._ends = [machine.end.remote(limit_s) for machine in self._machines]

    def end(self, limit_s: float) -> None:
        with self._end_lock:
            if self._ended:
                return
            self._ended = True
            self._tell_end(limit_s)
            left = max(0.0, min(limit_s + KILL_S, self._end_by - time.monotonic()))
            with contextlib.suppress(Exception):
                ray.wait(self._ends, num_returns=len(self._ends), timeout=left)
            for machine in self._machines:
                with contextlib.suppress(Exception):
                    ray.kill(machine)

    # --- the monitor's thread -----------------------------------------------------------------------------------------

    def _watch_machines(self) -> None:
        """Watches until the first failure, or until the machines are told to end."""
        starting = {machine.ready_or_failed.remote(): index for index, machine in enumerate(self._machines)}
        running = {machine.failed.remote(): index for index, machine in enumerate(self._machines)}
        while not self._closing:
            waiting = [*starting, *running]
            done, _ = ray.wait(waiting, num_returns=1, timeout=POLL_S)
            if self._closing:
                return
            failures = self._failures(done, starting | running)
            for ref in done:
                starting.pop(ref, None)
            if failures:
                left = {ref: index for ref, index in running.items() if ref not in done}
                self._fail([*failures, *self._later(left, failures)])
                return
            if not starting and not self.ready:
                self.ready = True
                self._on_change()

    def _failures(self, refs: Sequence[Any], index_of: dict[Any, int]) -> list[UserError | EngineError]:
        """Returns the failures that these completed calls report."""
        failures: list[UserError | EngineError] = []
        for ref in refs:
            try:
                said: Failure | None = ray.get(ref)
            except ray.exceptions.RayError as error:
                (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
                host = self._addresses[index_of[ref]]
                machine = f"machine {index_of[ref]} of the server, on node {host},"
                failures.append(EngineError(f"{machine} is gone ({reason})"))
                continue
            if said is not None:
                failures.append(said.error())
        return failures

    def _later(self, running: dict[Any, int], failures: list[UserError | EngineError]) -> list[UserError | EngineError]:
        """Returns the failures that the other machines report within seconds."""
        begin, later = time.monotonic(), list[UserError | EngineError]()
        while running and not self._closing:
            lost = all(isinstance(each, EngineError) and each.lost_connection for each in [*failures, *later])
            left = begin + (NODE_S if lost else OTHERS_S) - time.monotonic()
            if left <= 0:
                break
            done, _ = ray.wait(list(running), num_returns=1, timeout=left)
            later += self._failures(done, running)
            for ref in done:
                del running[ref]
        return later

    def _fail(self, causes: list[UserError | EngineError]) -> None:
        failure = min(causes, key=lateness)
        if isinstance(failure, EngineError):
            logger.error("%s", f"{failure}\n{failure.details}".rstrip())
        self.failure = failure
        self._on_change()
        self.end(0.0)
