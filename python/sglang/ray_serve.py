"""A Ray Serve application: several servers behind one address, on nodes that Ray chooses.

    serve run sglang.ray_serve:application model_path=DIR num_servers=2 tp_size=4

`num_servers` is the number of servers; all other names are flags of `sglang serve`. Each server has as many
GPUs of one node as its layout takes (`tp_size` times `pp_size` times `dp_size`; CPUs with device=cpu), and answers the
routes of `sglang serve`. Ray Serve starts a server again that has died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.responses import StreamingResponse

from sglang.launch_server import report_user_errors, serve
from sglang.srt.errors import UserError
from sglang.srt.managers.wire.ipc import free_ports
from sglang.srt.plan.layout import asked_layout
from sglang.srt.server_args import ServerArgs

HOST = "127.0.0.1"
MAX_REQUESTS = 4096
"""Requests that Ray Serve gives a server at a time; it has its own queue and limits."""
START_S, END_S = 1800.0, 30.0
"""Seconds in which a large model is there, and in which running requests end."""
OF_CONNECTION = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"})
"""Headers that concern one connection."""


class ServedModel:
    """One server, as a child process. Its stdin tells it that this process is gone."""

    def __init__(self, words: list[str]) -> None:
        """words: flags of `sglang serve`. Raises RuntimeError where the server does not start."""
        (port,) = free_ports(HOST, 1)
        self._url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "sglang.ray_serve", *words, "--host", HOST, "--port", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._session: aiohttp.ClientSession | None = None
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            self.check_health()
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.__del__()
        raise RuntimeError(f"the server was not up after {START_S:g} s")

    def check_health(self) -> None:
        """Asked by Ray Serve, which replaces a server for which it raises."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"the server has ended with status {status}; its log says why")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Passes a request on, and the answer back as it comes. A client that leaves ends it on the server too."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
            )
        url = f"{self._url}{request.url.path}{'?' + request.url.query if request.url.query else ''}"
        body = await request.body()
        reply = await self._session.request(request.method, url, data=body, headers=_passed_on(request.headers))
        return StreamingResponse(_parts(reply), reply.status, _passed_on(reply.headers))

    def __del__(self) -> None:
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_CONNECTION}


async def _parts(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for part in reply.content.iter_any():
            yield part
    finally:
        reply.close()


def flags_of(values: Mapping[str, str]) -> list[str]:
    """Returns command-line words of names and values. "true" is a flag without a value; "false" is none."""
    words: list[str] = []
    for name, value in values.items():
        text = str(value)
        if text.lower() != "false":
            words += [f"--{name.replace('_', '-')}", *([] if text.lower() == "true" else [text])]
    return words


def application(values: dict[str, Any]) -> Any:
    """Returns the application. Raises UserError for wrong flags."""
    from ray.serve import deployment  # an extra

    flags = {name: value for name, value in values.items() if name != "num_servers"}
    if given := {"host", "port", "use_ray", "nnodes"} & flags.keys():
        raise UserError(
            f"{', '.join(sorted(given))}: Ray Serve places each server on one node, behind its own address."
        )
    words = flags_of(flags)
    args = ServerArgs.from_cli(words, "sglang.ray_serve")
    count = asked_layout(args).world_size * args.dp_size
    resources = {"num_cpus": count} if args.device == "cpu" else {"num_cpus": 1, "num_gpus": count}
    options = {
        "name": "sglang",
        "num_replicas": int(values.get("num_servers", 1)),
        "ray_actor_options": resources,
        "max_ongoing_requests": MAX_REQUESTS,
    }
    return deployment(**options)(ServedModel).bind(words)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


def main() -> int:
    """Serves as `sglang.launch_server` does, until stdin ends."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    return report_user_errors(lambda: serve(None, "sglang.ray_serve"))


if __name__ == "__main__":
    sys.exit(main())
