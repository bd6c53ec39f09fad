"""Starts an engine's processes, waits for them, watches and ends them.

    handle = launch_engine(args)          # returns at once; raises UserError for what can be known without the children
    handle.wait_ready()                   # raises UserError or EngineError, with all processes gone
    handle.watch(on_failure)              # called once for each replica of which a process dies later
    handle.shutdown()

With --use-ray the processes of a replica run on nodes of a cluster (`ray_cluster`); otherwise all run on this machine.
With --dp-size there are several replicas, each with ranks and a detokenizer of its own and independent of the others. A
replica of which a process has failed is ended, and the others go on.

Each child holds one end of a pipe, through which it sends `ready`, or why it failed. Since the pipe breaks when the
parent is gone, for whatever reason, a child never outlives its parent. Children ignore SIGINT and SIGTERM, which reach
a whole process group: the parent decides when they end.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.storage_options import refuse_missing_library
from sglang.srt.errors import UserError
from sglang.srt.managers import replica_processes
from sglang.srt.managers.engine_processes import EngineError
from sglang.srt.managers.front.media.served_media import ServedMedia, served_media
from sglang.srt.managers.front.server_defaults import check_server_defaults
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.front.tokenizer_trial import TokenizerTrial
from sglang.srt.managers.measure_first import measure_first
from sglang.srt.managers.ray_cluster.installed import check_installed
from sglang.srt.managers.reap import close_together
from sglang.srt.managers.replica_processes import ReplicaProcesses, start_processes
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.plan.layout import asked_node, replica_args
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

SCHEDULER_ENTRY = replica_processes.SCHEDULER_ENTRY
END_S = 3.0
"""Seconds that processes get to end by themselves. The others are killed, which takes up to `REAP_LIMIT_S` more; both
are over before `entrypoints.exit_guard` ends the program."""


class EngineHandle:
    """The processes of an engine's replicas on this machine and, where clients are answered, their tokenizer manager
    (`manager`)."""

    manager: TokenizerManager

    def __init__(self, args: ServerArgs, model_config: ModelConfig, media: ServedMedia | None = None) -> None:
        """media: None if the model reads text only."""
        self._ports = Ports.create_many(args.dp_size)
        self._replicas: Sequence[ReplicaProcesses] = []
        self._disconnect: Callable[[], None] = lambda: None
        """Leaves the cluster, if there is one."""
        self._changed = threading.Condition()
        """Notified when a replica is ready or has failed."""
        self._closed = False
        self._on_failure: Callable[[int, str], None] | None = None
        self._told: set[int] = set()
        """Replicas that `_on_failure` has been told of."""
        atexit.register(self.shutdown)  # runs before multiprocessing's exit handler, which would wait for the children
        try:
            answers = asked_node(args).answers
            self._start(args)
            for replica in self._replicas:
                replica.watch()
            if answers:
                self.manager = TokenizerManager(args, model_config, self._ports, load_tokenizer(args), media)
        except BaseException:
            self.shutdown(limit_s=0.0)
            raise

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Blocks until every process is ready. On failure, shuts all down and raises UserError or EngineError."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._first_failure or self._all_ready, timeout_s)
        failure = self._first_failure
        if not is_done:
            failure = EngineError(f"the engine did not start within {timeout_s:g} seconds")
        if failure is not None:
            self.shutdown(limit_s=0.0)
            raise failure

    def watch(self, on_failure: Callable[[int, str], None]) -> None:
        """Calls `on_failure(index, message)` from another thread, once for each replica of which a process dies
        unexpectedly."""
        with self._changed:
            self._on_failure, self._told = on_failure, set()
        self._on_change()

    @property
    def failure(self) -> str | None:
        """Returns why the engine is dead (the failure of its first replica); None while a replica lives."""
        alive = any(replica.failure is None for replica in self._replicas)
        return None if alive else str(self._first_failure)

    @property
    def process_ids(self) -> dict[str, int | None]:
        return {name: pid for replica in self._replicas for name, pid in replica.process_ids.items()}

    def shutdown(self, limit_s: float = END_S) -> None:
        """Ends all processes; kills those that are not gone after `limit_s` seconds. May be repeated. Requests that
        still run are lost: drain the manager before."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        end = time.monotonic() + limit_s
        for replica in self._replicas:  # all at once: a hung one takes its time from no other
            replica.tell_end(limit_s)
        left = max(0.0, end - time.monotonic())
        close_together(partial(replica.end, left) for replica in self._replicas)
        self._disconnect()
        self._ports[0].remove()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, args: ServerArgs) -> None:
        """Starts the processes of all replicas."""
        names = [f"DP{index}" if args.dp_size > 1 else "" for index in range(args.dp_size)]
        if args.use_ray:
            check_installed()
            from sglang.srt.managers.ray_cluster.cluster import RayCluster  # which imports ray

            cluster = RayCluster.connect()
            self._disconnect = cluster.leave
            self._ports, self._replicas = cluster.start(args, replica_args(args), self._ports, names, self._on_change)
            return
        replicas: list[ReplicaProcesses] = []
        self._replicas = replicas
        for each, ports, name in zip(replica_args(args), self._ports, names, strict=True):
            replicas.append(start_processes(each, ports, name, self._on_change, SCHEDULER_ENTRY))

    @property
    def _all_ready(self) -> bool:
        return all(replica.ready for replica in self._replicas)

    @property
    def _first_failure(self) -> UserError | EngineError | None:
        return next((replica.failure for replica in self._replicas if replica.failure is not None), None)

    def _on_change(self) -> None:
        """Handles a change of a replica's state. The monitors' threads call it."""
        with self._changed:
            self._changed.notify_all()
            tell = self._on_failure
            if tell is None:
                return
            failed = {index: replica.failure for index, replica in enumerate(self._replicas) if replica.failure}
            new = failed.keys() - self._told
            self._told |= new
        for index in sorted(new):
            tell(index, str(failed[index]))


def launch_engine(args: ServerArgs) -> EngineHandle:
    """Starts the processes for `args`. Raises UserError for a wrong model or tokenizer."""
    if not args.use_ray:  # its workers have packages of their own
        refuse_missing_library(args.hicache_storage_backend)
    model = ModelConfig.from_server_args(args)
    trial = TokenizerTrial(args)
    description = describe_served_model(args, model)  # before any process is started
    if args.preferred_sampling_params is not None:
        check_server_defaults(args, model)
    media = None
    if description.media is not None:
        by_class = description.transformers_class is not None
        media = served_media(args, model, description.media.tower.pixel_dtype(model.dtype), by_class)
    trial.check()
    measure_first(args)
    return EngineHandle(args, model, media)
