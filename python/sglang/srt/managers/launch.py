"""Starts an engine's processes, waits for them, watches them, ends them.

    handle = launch_engine(args)          # returns at once; raises UserError for what can be known without the children
    handle.wait_ready()                   # raises UserError or EngineError, with all processes gone
    handle.watch(on_failure)              # told once if a process dies later
    handle.shutdown()

Each child holds one end of a pipe. It says `ready` through it, or why it failed; and since the pipe breaks when the
parent is gone, however that ended, a child never outlives its parent. Children ignore SIGINT and SIGTERM, which reach
a whole process group: the parent decides when they go.

A child also gives signs of life from its start on: one that is stopped, or holds the interpreter for good, has no way
to say so itself. When a rank ends, the others fail too, wherever they wait for it: what they say is collected for a
moment, so that the first cause is named, and those that are still there print their stacks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.managers.child import ALIVE, ERROR, READY, STOP, USER_ERROR, child_main
from sglang.srt.managers.front.media.served_media import ServedMedia, served_media
from sglang.srt.managers.front.server_defaults import check_server_defaults
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.watchdog import beat_seconds
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.plan.layout import asked_node
from sglang.srt.plan.plan import describe_served_model
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

SCHEDULER_ENTRY = "sglang.srt.managers.scheduler.scheduler_process:run_scheduler"
"""`module:function(args, ports, rank, start_pipe)`; imported by the child only."""
DETOKENIZER_ENTRY = "sglang.srt.managers.detokenizer.detokenizer_manager:run_detokenizer"

_EXIT_GRACE_S = 1.0
"""Time for a dying child's last words to arrive, and those of the ranks that wait for it."""
_STACKS_S = 0.3
"""Time for the others to print their stacks."""
_MISSED_BEATS = 2.5
"""Signs of life that did not come, when another rank has failed already."""
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
"""Messages of collectives in a rank when another one has ended."""
START_SILENCE_S = 60.0
"""Least silence in seconds that is allowed while a child starts: loading a library from a slow disk holds the
interpreter."""


class EngineError(RuntimeError):
    """A process of the engine failed. `details` is its traceback, empty if it left none."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    @property
    def lost_connection(self) -> bool:
        """Returns whether the process failed only because another rank had ended."""
        last = self.details.splitlines()[-1:]
        return any(sign in line for line in last for sign in _LOST_CONNECTION)


@dataclass(slots=True)
class _Child:
    name: str
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    last_heard: float = field(default_factory=time.monotonic)

    def silent_for(self, seconds: float) -> bool:
        """Returns whether the child has given no sign of life for this many seconds."""
        limit_s = seconds if self.ready else max(seconds, START_SILENCE_S)
        return time.monotonic() - self.last_heard > limit_s


class EngineHandle:
    """The processes of one engine on this machine, and, on the one that answers, `manager`, the tokenizer manager that
    talks to them."""

    manager: TokenizerManager

    def __init__(self, args: ServerArgs, model_config: ModelConfig, media: ServedMedia | None = None) -> None:
        """media: None where the model reads text only."""
        self._ports = Ports.create()
        self._limit_s = args.watchdog_timeout
        self._children: list[_Child] = []
        self._settled = threading.Event()
        """Set when all children are ready or one has failed."""
        self._closing = False
        self._failure: UserError | EngineError | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        atexit.register(self.shutdown)  # before the exit handler of multiprocessing, which would wait for the children
        try:
            node = asked_node(args)
            ranks = node.layout
            for rank in node.ranks:
                name = "scheduler" if ranks.world_size == 1 else f"scheduler {ranks.name(rank)}"
                self._spawn(name, SCHEDULER_ENTRY, (args, self._ports, rank))
            if node.answers:
                self._spawn("detokenizer", DETOKENIZER_ENTRY, (args, self._ports, 0))
            self._monitor = threading.Thread(target=self._watch_children, name="engine-monitor", daemon=True)
            self._monitor.start()
            if node.answers:
                self.manager = TokenizerManager(args, model_config, self._ports, load_tokenizer(args), media)
        except BaseException:
            self.shutdown(limit_s=0.0)
            raise

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Block until every process is ready. On failure all are shut down and UserError or EngineError is raised."""
        settled = self._settled.wait(timeout_s)
        failure = self._failure
        if not settled:
            failure = EngineError(f"the engine did not start within {timeout_s:g} seconds")
        if failure is not None:
            self.shutdown(limit_s=0.0)
            raise failure

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure(message)` from another thread, once, when a process dies although nobody asked it to."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(str(failure))

    @property
    def failure(self) -> str | None:
        """Returns why the engine is dead, or None."""
        return None if self._failure is None else str(self._failure)

    @property
    def process_ids(self) -> dict[str, int | None]:
        return {child.name: child.process.pid for child in self._children}

    def shutdown(self, limit_s: float = 5.0) -> None:
        """End all processes; those that are not gone after `limit_s` seconds are killed. Harmless when repeated. What
        still runs is lost: drain the manager before."""
        if self._closing:
            return
        atexit.unregister(self.shutdown)
        self._end_children(limit_s)
        self._ports.remove()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, entry: str, call: tuple[ServerArgs, Ports, int]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=child_main, args=(name, entry, call, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        self._children.append(_Child(name, process, ours))

    def _end_children(self, limit_s: float) -> None:
        self._closing = True
        for child in self._children:
            # A message, because closing would not break the pipe while the monitor thread waits on it.
            with contextlib.suppress(OSError):  # already gone
                child.pipe.send_bytes(STOP)
        end = time.monotonic() + limit_s
        for child in self._children:
            child.process.join(max(0.0, end - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.pipe.close()

    def _watch_children(self) -> None:
        """Body of the monitor thread: ends with the first failure, or when the engine is shut down."""
        by_pipe = {child.pipe: child for child in self._children}
        while not self._closing:
            try:
                failures = self._listen(by_pipe, beat_seconds(self._limit_s))
                silent = [child for child in self._children if child.silent_for(self._limit_s)]
                causes = self._causes(by_pipe, failures) if failures or silent else []
                if self._closing:  # they ended because they were told to
                    return
                if causes:
                    self._fail(causes, by_pipe.values())
                    return
            except (OSError, ValueError):  # the pipes were closed by shutdown
                return
            if all(child.ready for child in self._children):
                self._settled.set()  # and watch on

    def _listen(self, by_pipe: dict[Connection, _Child], timeout_s: float) -> list[UserError | EngineError]:
        """Waits for messages and returns the failures that have arrived."""
        failures: list[UserError | EngineError] = []
        for pipe in multiprocessing.connection.wait(list(by_pipe), timeout_s):
            failure = self._read(by_pipe[pipe])  # type: ignore[index]
            if failure is not None:
                del by_pipe[pipe]  # type: ignore[arg-type]
                failures.append(failure)
        return failures

    def _causes(
        self, by_pipe: dict[Connection, _Child], failures: list[UserError | EngineError]
    ) -> list[UserError | EngineError]:
        """Returns what has failed or is silent. The failure that began it comes first: the others may only have waited
        for it. Empty if what was silent speaks again. `by_pipe`: children that have not failed."""
        end = time.monotonic() + _EXIT_GRACE_S
        while not self._closing and len(by_pipe) > 1 and (left := end - time.monotonic()) > 0:
            failures += self._listen(by_pipe, left)  # the detokenizer waits for nobody
        failures.sort(key=_lateness)
        limit_s = _MISSED_BEATS * beat_seconds(self._limit_s)
        silent = [child for child in by_pipe.values() if child.silent_for(limit_s)]
        return [
            *(
                EngineError(f"the {child.name} process does not answer (--watchdog-timeout {self._limit_s:g})")
                for child in silent
            ),
            *failures,
        ]

    def _print_stacks(self, children: Iterable[_Child]) -> None:
        """Prints the stacks of the ranks that are still there to their stderr."""
        ranks = [child for child in children if child.name.startswith("scheduler ")]
        for child in ranks:
            logger.error("Where %s is:", child.name)
            with contextlib.suppress(OSError):
                os.kill(child.process.pid or 0, signal.SIGUSR1)
            time.sleep(_STACKS_S)

    def _read(self, child: _Child) -> UserError | EngineError | None:
        child.last_heard = time.monotonic()
        try:
            message = child.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            child.process.join(_EXIT_GRACE_S)
            return EngineError(f"the {child.name} process died ({_exit_reason(child.process.exitcode)})")
        if message == ALIVE:
            return None
        if message == READY:
            child.ready = True
            return None
        if message.startswith(USER_ERROR):
            return UserError(message.removeprefix(USER_ERROR).decode())
        details = message.removeprefix(ERROR).decode(errors="replace").rstrip()
        return EngineError(f"the {child.name} process failed: {details.splitlines()[-1]}", details)

    def _fail(self, causes: list[UserError | EngineError], others: Iterable[_Child]) -> None:
        """`others` have not failed; if they wait for one that has, their stacks say where."""
        failure = causes[0]
        with self._lock:
            if self._closing:
                return
            self._failure = failure
            callback = self._on_failure
        started = self._settled.is_set()
        if isinstance(failure, EngineError):
            logger.error("%s", f"{failure}\n{failure.details}".rstrip())
            for later in causes[1:]:
                _log_consequence(later)
            if started:
                self._print_stacks(others)
        self._settled.set()
        if callback is not None:
            callback(str(failure))


def _lateness(failure: UserError | EngineError) -> int:
    """Orders failures of ranks, whenever they were heard of. Who dies without a word began it; who lost its connection
    to another rank did not."""
    if isinstance(failure, UserError):
        return 1
    return 2 if failure.lost_connection else int(bool(failure.details))


def _log_consequence(failure: UserError | EngineError) -> None:
    if isinstance(failure, UserError):
        return
    if failure.lost_connection:
        logger.error("Then %s process lost its connection to another rank", str(failure).partition(" process ")[0])
        logger.debug("%s", failure.details)
    else:
        logger.error("Then %s", f"{failure}\n{failure.details}".rstrip())


def launch_engine(args: ServerArgs) -> EngineHandle:
    """Start the processes for `args`. Raises UserError for a wrong model or tokenizer."""
    model = ModelConfig.from_server_args(args)
    description = describe_served_model(args, model)  # before any process is started
    if args.preferred_sampling_params is not None:
        check_server_defaults(args, model)
    media = served_media(args, model) if description.media is not None else None
    if media is not None and args.nnodes > 1:
        raise UserError("images are served on one machine only; pass --language-model-only with --nnodes.")
    return EngineHandle(args, model, media)


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
