"""The server process: binds the port, starts the engine, serves, and shuts down in order.

bind -> serve 503 -> start the engine -> warm up -> serve -> SIGTERM: refuse, finish what runs, exit 0
                                                        |      `-> SIGTERM again: fail what runs, exit 0
                                                        `-> the last engine dies: fail what runs, exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sglang.srt.entrypoints.exit_guard import ExitGuard
from sglang.srt.entrypoints.http_app import create_app
from sglang.srt.entrypoints.http_native import warm_up
from sglang.srt.entrypoints.http_protocol import HttpProtocol
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.managers.engine_processes import EngineError
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager
from sglang.srt.managers.launch import EngineHandle, launch_engine
from sglang.srt.managers.reap import close_together
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

READY_LINE = "The server is fired up and ready to roll!"
ENGINE_DIED = 1
"""Exit status after an engine process has died."""
WARMUP_LIMIT_S = 600.0
"""Limit for the first request, which may compile kernels."""
FAILURE_GRACE_S = 1.0
"""Seconds for clients and probes to notice that the engine is gone before the process ends."""
CLOSE_LIMIT_S = 2
"""Seconds for connections whose answers are complete."""
LAUNCH_END_S = 2.5
"""Seconds that the launch of processes gets, before those that are there are ended."""
PROCESSES_END_S = 1.0
"""Seconds for the engine's processes to end by themselves. Those that hang are killed, which takes up to `REAP_LIMIT_S`
more; the rest of the server ends at the same time."""
KEEP_ALIVE_S = 60
LISTEN_BACKLOG = 2048
GC_OBJECTS = 20_000
"""New containers that start a collection of the youngest generation. A batch of outputs has hundreds and leaves no
cycles; with Python's default of 700 the server would scan every stream many times a second."""
FEW_OPEN_FILES = 1024
MAX_OPEN_FILES = 1 << 16
"""Limit of open files, mostly connections. The usual limit of 1,024 is soft, and a few clients reach it."""


_OF_TRAINERS = {
    "Engine": "engine",
    **dict.fromkeys(("app", "set_global_state", "_GlobalState"), "trainer_server"),
}
"""Names that trainers import from here, and their modules, which are loaded when somebody asks for them."""


def __getattr__(name: str) -> Any:
    if name not in _OF_TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__package__}.{_OF_TRAINERS[name]}"), name)


def launch_server(args: ServerArgs) -> None:
    """Serves until told to stop. Returns after an orderly shutdown; raises UserError, or SystemExit if the engine
    died."""
    run_server(args, Server)


def run_server(args: ServerArgs, create: Callable[[ServerArgs, socket.socket], Server]) -> None:
    """Runs the server that `create` makes, as `launch_server` does."""
    logging.getLogger("uvicorn").setLevel((args.log_level_http or "warning").upper())
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    access.addFilter(without_query)
    _allow_open_files()
    listener = bind(args.host, args.port)
    with contextlib.closing(listener):
        _use_uvloop()
        server = create(args, listener)
        try:
            exit_code = asyncio.run(server.run())
        finally:
            server.guard.end_within(server.guard.limit_s)
    if exit_code:
        sys.exit(exit_code)


def without_query(record: logging.LogRecord) -> bool:
    """Removes the query from a line of uvicorn's access log, because clients may put keys there."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg.partition("?")[0] if isinstance(arg, str) and arg.startswith("/") else arg for arg in record.args
        )
    return True


_LISTEN_ADVICE = {
    errno.EADDRINUSE: "Stop the program that uses the port, or choose another one with --port.",
    errno.EADDRNOTAVAIL: "This machine has no such address: --host takes one of its own, or 0.0.0.0 for all of them.",
    errno.EACCES: "Ports below 1024 need privileges: choose another one with --port.",
}


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises UserError if the address is not available."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UserError(f"--host {host}: {error.strerror}") from error
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        advice = _LISTEN_ADVICE.get(error.errno or 0, "Choose others with --host and --port.")
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}. {advice}") from error
    listener.setblocking(False)
    return listener


def _allow_open_files() -> None:
    """Raises the soft limit of open files, up to MAX_OPEN_FILES. Logs a warning if the result is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < maximum:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, hard))
    if maximum < FEW_OPEN_FILES:
        logger.warning(
            "The system lets this server open %d files, and each connection is one: further clients are turned away. "
            "Raise the limit with `ulimit -Hn 65536`, docker's --ulimit nofile=65536 or systemd's LimitNOFILE=65536.",
            maximum,
        )


def _use_uvloop() -> None:
    """Uses uvloop, which is about twice as fast as asyncio's event loop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


async def _drain_all(managers: Sequence[TokenizerManager]) -> bool:
    return all(await asyncio.gather(*(manager.drain(envs.SGLANG_DRAIN_TIMEOUT) for manager in managers)))


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, because the engine has to drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of the server. Ends by itself (`_stop`) or through the engine's failure (`_died`)."""

    def __init__(self, args: ServerArgs, listener: socket.socket) -> None:
        self.args = args
        self.listener = listener
        self.state = ServerState(args)
        self._handles: list[EngineHandle] = []
        self._launched = threading.Event()
        """Cleared while processes are launched, those of the front among them, which a signal must end, too."""
        self._launched.set()
        self._http = _HttpServer(
            uvicorn.Config(
                self._app(),
                http=HttpProtocol,
                ws="none",  # even if a WebSocket library is installed
                log_config=None,
                access_log=args.log_requests,
                lifespan="off",
                backlog=LISTEN_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_LIMIT_S,
            )
        )
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._died = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.guard = ExitGuard(self._pass_signal_on)

    async def run(self) -> int:
        """Runs the server and returns its exit status. Raises UserError if the engine cannot start for a reason that
        the user can correct."""
        self._loop = asyncio.get_running_loop()
        self.guard.take_signals()
        serving = asyncio.ensure_future(self._http.serve(sockets=[self.listener]))
        try:
            return await self._live()
        finally:
            self.guard.end_within(self.guard.limit_s)
            self._http.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            if not self._launched.is_set():  # a signal came meanwhile
                await asyncio.to_thread(self._launched.wait, LAUNCH_END_S)
            parts: list[Callable[[], None]] = [state.close for state in self._states()]
            for handle in self._handles:
                parts += [partial(handle.shutdown, PROCESSES_END_S), handle.manager.end_helpers]
            close_together(parts)
            for handle in self._handles:
                handle.manager.close()

    def _app(self) -> ASGIApp:
        """Returns the application that answers."""
        return create_app(self.state)

    def _states(self) -> Sequence[ServerState]:
        """Returns the states of all models."""
        return [self.state]

    async def _start(self) -> None:
        """Starts all engines. Raises UserError or EngineError."""
        handle = await self._start_engine(self.args, self.state, self._on_engine_failure)
        if not self._died.is_set():
            await self._warm_up(self.args, handle)
            self._say_ready()

    async def _live(self) -> int:
        try:
            if not await self._or_stop(self._start()):
                return 0
        except EngineError as error:
            self.state.failure = str(error)
            logger.error("The server does not start: %s", error)
            return ENGINE_DIED
        if not self._died.is_set():
            await self._or_stop(self._died.wait())
        if self._died.is_set():
            await asyncio.sleep(FAILURE_GRACE_S)
            return ENGINE_DIED
        await self._drain()
        return 0

    def _pass_signal_on(self) -> None:
        """Hands a signal to the event loop. Called from the guard's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        self._num_signals += 1
        (self._stop if self._num_signals == 1 else self._stop_now).set()

    async def _or_stop(self, work: Coroutine[Any, Any, object]) -> bool:
        """Waits for `work` (raising its error) or for the first signal. Returns False if the signal came first."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return bool(task.done())
        finally:
            for pending in (task, stopped):
                pending.cancel()

    async def _start_engine(
        self, args: ServerArgs, state: ServerState, on_failure: Callable[[EngineHandle, int, str], None]
    ) -> EngineHandle:
        """Starts the processes of a model, and returns when they are ready. on_failure(handle, replica, message):
        called for each replica that fails later. Raises UserError or EngineError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def resolve(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def work() -> None:
            try:
                try:
                    handle = launch_engine(args)
                    self._handles.append(handle)
                    state.connect(handle.manager)
                finally:
                    self._launched.set()
                handle.wait_ready()
            except BaseException as error:
                outcome: BaseException | None = error
            else:
                outcome = None
            with contextlib.suppress(RuntimeError):  # the loop has ended because of a signal
                loop.call_soon_threadsafe(resolve, outcome)

        self._launched.clear()
        # A daemon thread, so that a signal can end the program while it waits.
        threading.Thread(target=work, name="engine-start", daemon=True).start()
        await done
        handle = self._handles[-1]
        handle.manager.attach()

        def report(replica: int, message: str) -> None:
            if all(each.failure is not None for each in self._handles):  # covers an event loop that hangs
                self.guard.end_within(FAILURE_GRACE_S + self.guard.limit_s)
            loop.call_soon_threadsafe(on_failure, handle, replica, message)

        handle.watch(report)
        return handle

    def _on_engine_failure(self, handle: EngineHandle, replica: int, message: str) -> None:
        """Handles the failure of a replica, once for each; its monitor has logged the traceback."""
        if not handle.manager.lose_replica(replica, message):
            self.state.failure = message
            self._died.set()

    async def _warm_up(self, args: ServerArgs, handle: EngineHandle) -> None:
        manager = handle.manager
        if not args.skip_server_warmup:
            started = time.perf_counter()
            try:
                await asyncio.wait_for(warm_up(manager), WARMUP_LIMIT_S)
            except asyncio.TimeoutError:
                raise EngineError(f"the first request got no answer within {WARMUP_LIMIT_S:.0f} s") from None
            except RequestError as error:
                raise EngineError(f"the first request failed: {error.message}") from error
            logger.info("The first request took %.2f s.", time.perf_counter() - started)
        try:
            await manager.load_corpus_file()
        except RequestError as error:
            raise EngineError(f"--speculative-ngram-external-corpus-path: {error.message}") from error
        try:
            await manager.load_adapters()
        except RequestError as error:
            raise EngineError(f"--lora-paths: {error.message}") from error
        manager.mark_up()

    def _say_ready(self) -> None:
        self.guard.drain_s = envs.SGLANG_DRAIN_TIMEOUT
        gc.freeze()  # keeps collections under load from scanning the objects of start-up
        gc.set_threshold(GC_OBJECTS, 10, 10)
        logger.info("Listening on %s", self.args.url())
        logger.info(READY_LINE)

    async def _drain(self) -> None:
        managers = [handle.manager for handle in self._handles]
        for manager in managers:
            manager.begin_shutdown()
        if count := sum(manager.num_unfinished for manager in managers):
            logger.info("Shutting down: waiting for %d requests.", count)
        draining = asyncio.ensure_future(_drain_all(managers))
        hurried = asyncio.ensure_future(self._stop_now.wait())
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait({draining, hurried, died}, return_when=asyncio.FIRST_COMPLETED)
        for pending in (draining, hurried, died):
            pending.cancel()
        if self._stop_now.is_set() and (count := sum(manager.num_unfinished for manager in managers)):
            logger.warning("Shutting down at once: %d requests end with an error.", count)
            for manager in managers:
                manager.fail_all(RequestError("The server is shutting down.", 503))
        logger.info("The server has shut down.")
