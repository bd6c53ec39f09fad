"""Servers behind HTTP, this one and upstream: started side by side, asked by token ids, ended with their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 26


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Keywords of server options as flags of a command."""
    flags = []
    for name, value in options.items():
        flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


class Server:
    """Begins to start `command` with the flags behind it. `wait` says whether it serves."""

    def __init__(
        self, command: Sequence[str], options: Mapping[str, Any], env: Mapping[str, str], log: Path, port: int
    ) -> None:
        self.port, self.log, self.begun = port, log, time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *flags_of(options), "--host", "127.0.0.1", "--port", str(port)],
                env=dict(env), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self, limit: float) -> float:
        """Returns the seconds that the start took. Raises RuntimeError with the end of the log if it ended, or does not
        serve `limit` seconds after it began; it is stopped then."""
        while not self._serves():
            ended, seconds = self.process.poll() is not None, time.monotonic() - self.begun
            if ended or seconds > limit:
                self.stop()
                said = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
                raise RuntimeError(f"{'ended' if ended else 'not ready'} after {seconds:.0f} s: {said}")
            time.sleep(0.25)
        return time.monotonic() - self.begun

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/model_info", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/get_server_info", timeout=60) as answer:
            return dict(json.load(answer))

    async def events(self, ids: Sequence[int], output: int) -> AsyncIterator[tuple[float, bytes]]:
        """The events of a greedy answer as they come: seconds since the request was sent, and their JSON."""
        sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
        body = json.dumps({"input_ids": list(ids), "sampling_params": sampling, "stream": True}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=MAX_LINE_BYTES)
        try:
            start = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            status = await reader.readline()
            if b" 200" not in status:
                raise RuntimeError(f"/generate: {status!r} {await reader.read(2000)!r}")
            async for line in reader:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield time.perf_counter() - start, data
        finally:
            writer.close()

    def stop(self) -> None:
        """Ends its processes."""
        for sign, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                if sign == signal.SIGTERM:
                    continue  # what it started may be left
        time.sleep(0.2)


def last_meta(data: bytes) -> tuple[dict[str, Any], list[int]]:
    """Returns what the last event of an answer says about it, and its token ids. Raises RuntimeError for an error."""
    event = json.loads(data) if data else {}
    if "meta_info" not in event:
        raise RuntimeError(f"/generate ended with {data[:500]!r}")
    return event["meta_info"], event.get("output_ids") or []
