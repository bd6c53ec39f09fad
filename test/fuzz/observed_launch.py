"""`python observed_launch.py SOCKET [options]`: the server, with two windows into its front process.

The Unix socket SOCKET answers every connection with the unfinished tasks of the event loop, as JSON: how many by the
name of their coroutine. SIGUSR1 writes the stacks of all threads to the log. Nothing of the server is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import signal
import sys
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from sglang.launch_server import report_user_errors, serve

T = TypeVar("T")


async def tell_tasks(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    counts = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in others)
    writer.write(json.dumps(counts).encode())
    with contextlib.closing(writer):
        await writer.drain()


def observe(socket_path: str) -> None:
    """Let the next `asyncio.run` answer on `socket_path`."""
    run = asyncio.run

    def observed_run(main: Coroutine[Any, Any, T]) -> T:
        async def observed() -> T:
            async with await asyncio.start_unix_server(tell_tasks, socket_path):
                return await main

        return run(observed())

    asyncio.run = observed_run  # type: ignore[assignment]
    faulthandler.register(signal.SIGUSR1, all_threads=True)


if __name__ == "__main__":
    observe(sys.argv[1])
    sys.exit(report_user_errors(lambda: serve(sys.argv[2:], "python -m sglang.launch_server")))
