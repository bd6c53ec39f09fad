"""Store in Mooncake: main memory of several machines, which a master hands out.

    --hicache-storage-backend mooncake
    --hicache-storage-backend-extra-config '{"master_server_address": "10.0.0.1:50051", "global_segment_size": 0}'

Needs `pip install mooncake-transfer-engine` (without CUDA: `mooncake-transfer-engine-non-cuda`) and libibverbs. Memory
that a rank gives to the store (`global_segment_size`) is lost when the rank ends. What should outlive it is kept by a
process of its own: `mooncake_client`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.configs.storage_options import FLAG, MooncakeOptions, needed_library
from sglang.srt.errors import UserError

PREFIX = "sglang:kv:"
NO_ROOM, NOT_FOUND = -200, -704
"""Status of a write when the store is full, and of a removal of what is not there."""
ROOM_LIMIT_S = 2.0
"""Seconds that a write waits while the store evicts others."""
ROOM_POLL_S = 0.05


class MooncakeStore:
    """Prefix store in Mooncake. Implements PrefixStore."""

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises UserError, also if no master answers."""
        self._options, self.key = options, options.key
        self._client = _connect(options)

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Returns which entries exist. Raises OSError."""
        if not names:
            return []
        states = self._client.batch_is_exist([PREFIX + name for name in names])
        if failed := [state for state in states if state < 0]:
            raise OSError(f"Mooncake cannot look up entries: status {failed[0]}")
        return [bool(state) for state in states]

    def read(self, name: str) -> bytes | None:
        data: bytes = self._client.get(PREFIX + name)
        return data or None

    def write(self, name: str, data: bytearray) -> None:
        """Writes an entry, once others have made room. Raises OSError, and ValueError for an entry that is too
        large."""
        if len(data) > self._options.buffer_bytes:
            raise ValueError(
                f"an entry of {len(data):,} bytes: local_buffer_size is {self._options.buffer_bytes:,} bytes"
            )
        deadline = time.monotonic() + ROOM_LIMIT_S
        while status := self._client.put(PREFIX + name, data):
            if status != NO_ROOM or time.monotonic() > deadline:
                raise OSError(f"Mooncake cannot store {len(data):,} bytes: status {status}")
            time.sleep(ROOM_POLL_S)

    def delete(self, name: str) -> None:
        """Removes an entry, also one that was read a moment ago. Raises OSError."""
        status = self._client.remove(PREFIX + name, True)
        if status not in (0, NOT_FOUND):
            raise OSError(f"Mooncake cannot remove an entry: status {status}")

    def close(self) -> None:
        """Takes the memory back. Not while no master answers: the library would hold the interpreter's lock until it
        gives up. A master forgets a client that is gone."""
        if _is_reachable(self._options):
            self._client.close()


def _is_reachable(options: MooncakeOptions) -> bool:
    try:
        socket.create_connection(options.address, timeout=options.timeout_s).close()
    except OSError:
        return False
    return True


def _connect(options: MooncakeOptions) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise UserError(f"{needed_library('mooncake')} ({error}).") from None
    # The library tries for minutes, and holds the interpreter's lock meanwhile.
    if not _is_reachable(options):
        raise UserError(
            f"--hicache-storage-backend mooncake: no master answers at {options.master}. Start it (mooncake_master),"
            " correct master_server_address, or remove the flag."
        )
    client = MooncakeDistributedStore()
    status = client.setup(
        options.host,
        options.metadata,
        options.segment_bytes,
        options.buffer_bytes,
        options.protocol,
        options.devices,
        options.master,
    )
    if status:
        raise UserError(
            f"--hicache-storage-backend mooncake: the client cannot be set up (status {status}). See {FLAG}:"
            " metadata_server, local_hostname, protocol and device_name."
        )
    return client
