"""A server behind HTTP in the place of an `Engine`, as far as the sessions need one: any that has `/generate`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

PORT = 31_337


def flags_of(options: dict[str, Any]) -> list[str]:
    """Keywords of an `Engine` as flags of a command."""
    flags = []
    for name, value in options.items():
        flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


class HttpEngine:
    """Starts `command` with the flags behind it, and ends its processes in `shutdown`."""

    def __init__(self, command: str, options: dict[str, Any], limit: float = 300.0) -> None:
        self.url = f"http://127.0.0.1:{PORT}"
        words = [*shlex.split(command), *flags_of(options), "--port", str(PORT)]
        self.process = subprocess.Popen(words, start_new_session=True)
        end = time.monotonic() + limit
        while not self._answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}")
            if time.monotonic() > end:
                self.shutdown()
                raise RuntimeError(f"the server is not ready after {limit:g} s")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def generate(
        self, input_ids: Sequence[int], sampling_params: dict[str, Any], stream: bool = True
    ) -> Iterator[dict[str, Any]]:
        body = {"input_ids": list(input_ids), "sampling_params": sampling_params, "stream": True}
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            answer = urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"/generate: {error.code} {error.read(2000)!r}") from None
        with answer:
            for line in answer:
                text = line.decode().strip()
                if text.startswith("data:") and text[5:].strip() != "[DONE]":
                    yield json.loads(text[5:])

    def get_server_info(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/get_server_info", timeout=60) as answer:
            return dict(json.load(answer))

    def shutdown(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
