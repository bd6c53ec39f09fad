"""The server process: binds the port, starts the engine, serves, and ends in order.

    bind -> serve (503) -> start the engine -> warm up -> serve -> SIGTERM: refuse, finish what runs, exit 0
                                                              `-> an engine process dies: fail what runs, exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import uvicorn

from sglang.srt.entrypoints.http_app import create_app
from sglang.srt.entrypoints.http_native import probe
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.errors import UserError
from sglang.srt.managers.launch import EngineHandle, launch_engine
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")

READY_LINE = "The server is fired up and ready to roll!"
DRAIN_LIMIT_S = 30.0
"""How long running requests may take to finish after SIGTERM; a second signal ends them at once."""
WARMUP_LIMIT_S = 600.0
"""The first request may compile kernels."""
FAILURE_GRACE_S = 1.0
"""Time for clients and probes to see that the engine is gone, before the process ends."""
CLOSE_LIMIT_S = 5
LISTEN_BACKLOG = 2048


def launch_server(args: ServerArgs) -> None:
    """Serve until told to stop. Returns after an orderly end; raises UserError, or SystemExit if the engine died."""
    logging.getLogger("uvicorn").setLevel((args.log_level_http or args.log_level).upper())
    listener = bind(args.host, args.port)
    with contextlib.closing(listener):
        exit_code = asyncio_run(_Server(args, listener).run)
    if exit_code:
        sys.exit(exit_code)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UserError(f"--host {host}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop the program that uses the port, or choose another "
            "with --port."
        ) from error
    listener.setblocking(False)
    return listener


def asyncio_run(main: Callable[[], asyncio.Future[T]]) -> T:
    """As asyncio.run, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    return asyncio.run(main())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: the engine has to drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One life of the server."""

    def __init__(self, args: ServerArgs, listener: socket.socket) -> None:
        self.args = args
        self.listener = listener
        self.state = ServerState(args)
        self.http = _Uvicorn(
            uvicorn.Config(
                create_app(self.state),
                log_config=None,
                access_log=args.log_requests,
                lifespan="off",
                timeout_keep_alive=60,
                timeout_graceful_shutdown=CLOSE_LIMIT_S,
            )
        )
        self.stop = asyncio.Event()
        self.engine_failure: asyncio.Future[str] | None = None
        self.handle: EngineHandle | None = None
