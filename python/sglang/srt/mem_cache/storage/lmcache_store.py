"""Store in an LMCache server (`lmcache_server HOST PORT`), by its protocol over TCP; LMCache is not imported.

    --hicache-storage-backend lmcache
    --hicache-storage-backend-extra-config '{"url": "lm://10.0.0.1:65432"}'

A request is nine integers and a key, and the data behind it where something is written; an answer is nine integers, and
the data where something was read. Writes are not answered, and nothing can be removed: an entry without content stands
for one that was removed.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

from sglang.srt.configs.storage_options import LMCacheOptions
from sglang.srt.errors import UserError

PUT, GET, EXIST, HEALTH = 1, 2, 3, 5
FOUND = 200
BINARY, UINT8 = 4, 6
"""LMCache's numbers of the format and of the type of an entry."""
KEY_BYTES = 150
REQUEST, ANSWER = struct.Struct(f"=9i{KEY_BYTES}s"), struct.Struct("=9i")
MAX_ENTRY_BYTES = (1 << 31) - 1
MAX_REQUESTS = 256
"""Questions that are sent before their answers are read: neither side's buffers fill up."""


class LMCacheStore:
    """Prefix store in an LMCache server. Implements PrefixStore. Each thread has a connection, which is opened again
    after an error."""

    def __init__(self, options: LMCacheOptions) -> None:
        """Raises UserError if no LMCache server answers."""
        self._options, self.key = options, options.key
        self._threads, self._lock = threading.local(), threading.Lock()
        self._open: list[socket.socket] = []
        self._removed: set[str] = set()
        """Names of entries that this process has emptied, and may write again."""
        try:
            (code,) = self._ask([_request(HEALTH, "b" + "0" * 64)])
        except OSError as error:
            raise UserError(
                f"--hicache-storage-backend lmcache: no LMCache server answers at {options.address[0]}:"
                f"{options.address[1]} ({error}). Start it (lmcache_server HOST PORT), correct the url, or remove the"
                " flag."
            ) from None
        if code != FOUND:
            raise UserError("--hicache-storage-backend lmcache: what answers is no LMCache server.")

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Returns which entries exist. Raises OSError."""
        there: list[bool] = []
        for first in range(0, len(names), MAX_REQUESTS):
            asked = names[first : first + MAX_REQUESTS]
            codes = self._ask([_request(EXIST, name) for name in asked])
            there += [code == FOUND and name not in self._removed for code, name in zip(codes, asked, strict=True)]
        return there

    def read(self, name: str) -> bytearray | None:
        """Returns an entry; None if there is none. Raises OSError."""
        with _Exchange(self) as connection:
            connection.sendall(_request(GET, name))
            code, size = ANSWER.unpack(_receive(connection, ANSWER.size))[:2]
            if size < 0:
                raise ConnectionError("what answers is no LMCache server")
            data = _receive(connection, size)
        return data if code == FOUND and data else None

    def write(self, name: str, data: bytearray) -> None:
        """Writes an entry. Asks for it then, as the server says nothing to a write. Raises OSError, and ValueError for
        an entry that is too large."""
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(f"an entry of {len(data):,} bytes: LMCache holds {MAX_ENTRY_BYTES:,} at most")
        with _Exchange(self) as connection:
            connection.sendall(_request(PUT, name, len(data)))
            connection.sendall(data)
            connection.sendall(_request(EXIST, name))
            if ANSWER.unpack(_receive(connection, ANSWER.size))[0] != FOUND:
                raise OSError("LMCache has not stored an entry")
        self._removed.discard(name)

    def delete(self, name: str) -> None:
        """Empties an entry, if there is one. Raises OSError."""
        if self.contains([name])[0]:
            self.write(name, bytearray())
            self._removed.add(name)

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()

    def _ask(self, requests: Sequence[bytes]) -> list[int]:
        """Returns the codes of the answers to requests without data."""
        with _Exchange(self) as connection:
            connection.sendall(b"".join(requests))
            answers = _receive(connection, len(requests) * ANSWER.size)
        return [answer[0] for answer in ANSWER.iter_unpack(answers)]

    def _connection(self) -> socket.socket:
        """Returns this thread's connection."""
        connection: socket.socket | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = socket.create_connection(self._options.address, timeout=self._options.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.append(connection)
            self._threads.connection = connection
        return connection

    def _drop(self) -> None:
        """Closes this thread's connection."""
        connection: socket.socket | None = getattr(self._threads, "connection", None)
        self._threads.connection = None
        if connection is not None:
            connection.close()
            with self._lock:
                if connection in self._open:
                    self._open.remove(connection)


class _Exchange:
    """Requests and their answers on a thread's connection, which is dropped where they are cut off."""

    def __init__(self, store: LMCacheStore) -> None:
        self._store = store

    def __enter__(self) -> socket.socket:
        return self._store._connection()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._store._drop()


def _request(command: int, name: str, size: int = 0) -> bytes:
    """Returns the head of a request. The key has LMCache's form: a model, ranks, a rank, a hash and a type."""
    key = f"sglang-{name[0]}@1@0@{name[1:]}@uint8".encode()
    return REQUEST.pack(command, size, BINARY, UINT8, 0, size, 0, 0, 0, key.ljust(KEY_BYTES))


def _receive(connection: socket.socket, size: int) -> bytearray:
    """Returns `size` bytes. Raises ConnectionError where the connection ends before."""
    data = bytearray(size)
    view, count = memoryview(data), 0
    while count < size:
        more = connection.recv_into(view[count:])
        if not more:
            raise ConnectionError("the LMCache server has closed the connection")
        count += more
    view.release()
    return data
