"""`HANGS_IN=PART python hanging_launch.py [options]`: the server, of which one part never comes back."""

from __future__ import annotations

import asyncio
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sglang.launch_server import report_user_errors, serve
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager

HANGS = "it hangs here"


def hang(*_: Any, **__: Any) -> Any:
    print(HANGS, flush=True)
    while True:
        time.sleep(1000)


def hang_in_the_interpreter(*_: Any, **__: Any) -> Any:
    print(HANGS, flush=True)
    while True:
        pass


def before(function: Callable[..., Any], first: Callable[[], Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return both


def in_executor() -> None:
    asyncio.get_running_loop().run_in_executor(None, hang)


def in_thread() -> None:
    threading.Thread(target=hang).start()


def stop_rank() -> None:
    """Takes the first rank for one in an uninterruptible wait: signals do nothing to it."""
    rank = next(child for child in multiprocessing.active_children() if child.name == "scheduler")
    rank_pid, kill = rank.pid, multiprocessing.process.BaseProcess.kill

    def spare(process: multiprocessing.process.BaseProcess) -> None:
        if process.pid != rank_pid:
            kill(process)

    multiprocessing.process.BaseProcess.kill = spare  # type: ignore[method-assign]
    os.kill(rank_pid or 0, signal.SIGSTOP)


MANAGER: Any = TokenizerManager
MODULE: Any = http_server


def prepare(where: str) -> None:
    if where == "start":
        MODULE.launch_engine = hang
    elif where == "start-interpreter":
        MODULE.launch_engine = hang_in_the_interpreter
    elif where == "start-loop":
        MANAGER.attach = hang
    elif where == "loop":
        MANAGER.abort = hang
    elif where == "shutdown":
        MANAGER.begin_shutdown = hang
    elif where == "drain":
        MANAGER.drain = lambda *_: asyncio.sleep(1e9)
    elif where == "close":
        MANAGER.close = hang
    else:
        first = {"executor": in_executor, "thread": in_thread, "rank": stop_rank}[where]
        MANAGER.mark_up = before(MANAGER.mark_up, first)


if __name__ == "__main__":
    prepare(os.environ["HANGS_IN"])
    sys.exit(report_user_errors(lambda: serve(sys.argv[1:], "python -m sglang.launch_server")))
