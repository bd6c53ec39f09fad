"""HTTP as bytes on a socket, for requests that no client library would send."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import contains
from typing import Literal

ANSWER_LIMIT_S = 300.0
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})")
NUM_THREADS = 16

Step = bytes | float
"""Bytes to send, or seconds to wait."""


@dataclass(frozen=True)
class RawCase:
    """One connection."""

    name: str
    steps: Sequence[Step]
    statuses: Sequence[Sequence[int]] = ((400,),)
    """What each response in turn may be; 0 stands for a connection that ended without it."""
    ending: Literal["read", "half-close", "close", "reset"] = "read"
    """After the last step: read until the responses are there, say that no more is sent and read, or go away."""


def request(
    body: bytes = b"",
    headers: Sequence[bytes] = (),
    target: bytes = b"/generate",
    method: bytes = b"POST",
    length: bytes | None = b"",
    version: bytes = b"HTTP/1.1",
) -> bytes:
    """A request, correct unless told otherwise. `length` of None leaves Content-Length out."""
    lines = [method + b" " + target + b" " + version, b"Host: localhost", b"Content-Type: application/json", *headers]
    if length is not None:
        lines.append(b"Content-Length: " + (length or str(len(body)).encode()))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", headers: Sequence[bytes] = ()) -> bytes:
    head = request(headers=[b"Transfer-Encoding: chunked", *headers], length=None)
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def generate_body(**fields: object) -> bytes:
    return json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 2}, **fields}).encode()


def run_case(port: int, case: RawCase) -> str:
    """What was wrong with the responses; empty if nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_LIMIT_S) as connection:
        cut = send_steps(connection, case.steps)
        if case.ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if case.ending in ("close", "reset"):
            return ""
        if case.ending == "half-close" and not cut:
            connection.shutdown(socket.SHUT_WR)
        interim = case.ending == "half-close"  # a server may ask with one whether the client is still there
        statuses, complete = read_statuses(connection, len(case.statuses), interim)
    padded = [*statuses, *[0] * (len(case.statuses) - len(statuses))]
    fits = len(padded) == len(case.statuses) and all(map(contains, case.statuses, padded))
    if fits and complete:
        return ""
    return f"{case.name}: responses {statuses}{'' if complete else ' and then silence'}, not {list(case.statuses)}"


def send_steps(connection: socket.socket, steps: Sequence[Step]) -> bool:
    """Whether the server closed the connection before all was sent."""
    for step in steps:
        if isinstance(step, float):
            time.sleep(step)
            continue
        try:
            connection.sendall(step)
        except (BrokenPipeError, ConnectionResetError):
            return True
    return False


def read_statuses(connection: socket.socket, num_wanted: int, skip_interim: bool) -> tuple[list[int], bool]:
    """The statuses of the responses, and whether they came before the time limit."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
            excess = len(_statuses(received, skip_interim)) - num_wanted
            if excess > 0 or (excess == 0 and not _more(connection)):
                break
    except TimeoutError:
        return _statuses(received, skip_interim), False
    except ConnectionResetError:
        pass
    return _statuses(received, skip_interim), True


def _more(connection: socket.socket) -> bool:
    """Whether anything else comes at once. Connections are kept alive, so that their end cannot be waited for."""
    connection.settimeout(0.2)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except (TimeoutError, ConnectionResetError):
        return False
    finally:
        connection.settimeout(ANSWER_LIMIT_S)


def _statuses(received: bytes, skip_interim: bool) -> list[int]:
    statuses = [int(status) for status in STATUS_LINE.findall(received)]
    return [status for status in statuses if status >= 200] if skip_interim else statuses


def run_cases(port: int, cases: Sequence[RawCase]) -> list[str]:
    """What was wrong, of all cases, which run side by side."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return [wrong for wrong in threads.map(lambda case: run_case(port, case), cases) if wrong]
