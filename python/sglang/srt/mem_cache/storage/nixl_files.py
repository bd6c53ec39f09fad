"""Files that NIXL moves: a FileStore whose bytes go through NIXL's plugin POSIX (Linux AIO, io_uring or POSIX AIO).

    --hicache-storage-backend nixl
    --hicache-storage-backend-extra-config '{"plugin": {"posix": {"active": true, "use_uring": "true"}}}'

Needs `pip install nixl-cu13`, or `nixl-cu12`, whichever CUDA torch has; no GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.storage_options import NIXL_PACKAGES, NixlOptions, needed_library
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.mem_cache.storage.file_store import FileStore

PLUGIN = "POSIX"
MOVE_LIMIT_S = 30.0
"""Seconds that one file may take."""
POLL_S = 0.0001


def create_nixl_store(options: NixlOptions) -> FileStore:
    """Creates the store. Raises UserError if NIXL or its plugin is missing, or the directory cannot be used."""
    transfer = NixlTransfer(_import_nixl(), options.parameters)
    default = envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
    return FileStore.in_directory(options.directory, default, transfer, options.free_share)


def _import_nixl() -> Any:
    problems = []
    for package in NIXL_PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(str(error))
    raise UserError(f"{needed_library('nixl')} ({'; '.join(problems)}).")


class NixlTransfer:
    """Moves files by an agent of NIXL in each thread: transfers of one agent from several threads fail where io_uring
    is used. Implements FileTransfer."""

    def __init__(self, api: Any, parameters: Mapping[str, str]) -> None:
        """api: the module nixl._api. Raises UserError if it has no such plugin, or refuses its parameters."""
        self._api, self._parameters = api, dict(parameters)
        self._agents = threading.local()
        self._abandoned: list[bytearray] = []
        """Buffers of transfers that have not ended, in which NIXL may still read or write."""
        try:
            self._agent()
        except Exception as error:  # the library has errors of its own
            raise UserError(
                f"--hicache-storage-backend nixl: the plugin {PLUGIN} cannot be used, with {self._parameters}:"
                f" {error!r}."
            ) from None

    def read(self, file: int, data: bytearray) -> int:
        self._move("READ", file, data)
        return len(data)

    def write(self, file: int, data: bytearray) -> None:
        self._move("WRITE", file, data)

    def _agent(self) -> Any:
        """Returns this thread's agent."""
        agent = getattr(self._agents, "agent", None)
        if agent is None:
            name = f"sglang-{os.getpid()}-{threading.get_native_id()}"
            agent = self._api.nixl_agent(name, self._api.nixl_agent_config(backends=[]))
            agent.create_backend(PLUGIN, self._parameters)
            self._agents.agent = agent
        return agent

    def _move(self, operation: str, file: int, data: bytearray) -> None:
        """Moves all of `data`. Raises TimeoutError, OSError, and errors of NIXL's own."""
        if not data:
            return
        agent, size = self._agent(), len(data)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        regions = []
        try:
            for kind, region in (("DRAM", (address, size, 0, "")), ("FILE", (0, size, file, ""))):
                regions.append(agent.register_memory([region], kind, [PLUGIN]))
            here, there = ([(address, size, 0)], "DRAM"), ([(0, size, file)], "FILE")
            transfer = agent.initialize_xfer(
                operation, agent.get_xfer_descs(*here), agent.get_xfer_descs(*there), agent.name, b"", [PLUGIN]
            )
            self._wait(agent, transfer, data)
            agent.release_xfer_handle(transfer)
        finally:
            for region in regions:
                agent.deregister_memory(region, [PLUGIN])

    def _wait(self, agent: Any, transfer: Any, data: bytearray) -> None:
        deadline = time.monotonic() + MOVE_LIMIT_S
        state = agent.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > deadline:
                self._abandoned.append(data)
                raise TimeoutError(f"NIXL has not moved {len(data):,} bytes within {MOVE_LIMIT_S:g} s")
            time.sleep(POLL_S)
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise OSError(f"NIXL has not moved {len(data):,} bytes: {state}")
