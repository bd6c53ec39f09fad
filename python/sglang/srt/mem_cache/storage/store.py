"""Interface of stores of cached prefixes beyond main memory, and creation of the configured one.

A store is a map from names to bytes that may lose entries at any time. `python -m sglang.launch_server
--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"module_path": "my.module", "class_name":
"MyStore"}'` imports one; its constructor gets the remaining keys of the configuration.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sglang.srt.configs.storage_backend import StorageConfig
from sglang.srt.configs.storage_options import LMCacheOptions, MooncakeOptions, NixlOptions
from sglang.srt.errors import UserError
from sglang.srt.mem_cache.storage.file_store import FileStore

OPEN_LIMIT_S = 60.0
METHODS = ("contains", "read", "write", "delete")


class PrefixStore(Protocol):
    """A store that can be plugged in. All methods are called from several threads at once, never from the scheduler's.
    They may raise any exception: the server then does without the store for a while. It checks what it reads, so a
    store need not.

    Names have 65 characters, each a letter or a digit. All ranks of a server, and all servers that share a store, may
    read and write at once; an entry of one name always has the same meaning, so the last writer wins.

    A store that others may write has an attribute `key`, secret bytes: only entries written with the same key are then
    accepted. A store that has something to give back has a method `close()`; it is called once, after all other calls.
    """

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Returns which entries exist, and counts as a use of these. A store that evicts should keep those at the
        beginning of `names` longest: the others are useless without them."""

    def read(self, name: str) -> bytes | bytearray | None:
        """Returns an entry as it was written; None if there is none."""

    def write(self, name: str, data: bytearray) -> None:
        """Stores an entry, wholly or not at all. Raises an exception if it cannot."""

    def delete(self, name: str) -> None:
        """Removes an entry, if there is one."""


def create_store(config: StorageConfig) -> PrefixStore:
    """Creates the store that the flags name. Raises UserError if they are wrong or the store cannot be used, for
    example because nothing answers."""
    result: SimpleQueue[PrefixStore | Exception] = SimpleQueue()

    def open_it() -> None:
        try:
            result.put(_open(config))
        except Exception as error:  # the caller raises it
            result.put(error)

    threading.Thread(target=open_it, name="open-storage", daemon=True).start()
    try:
        opened = result.get(timeout=OPEN_LIMIT_S)
    except Empty:
        raise UserError(
            f"--hicache-storage-backend {config.backend}: the store has not opened within {OPEN_LIMIT_S:g} s. See that"
            " its directory or its server answers, or remove the flag."
        ) from None
    if isinstance(opened, Exception):
        raise opened
    return opened


def _open(config: StorageConfig) -> PrefixStore:
    """Imports what the backend needs, and no other backend's library."""
    if config.backend == "file":
        return FileStore.from_options(config.options)
    if config.backend == "nixl":
        from sglang.srt.mem_cache.storage.nixl_files import create_nixl_store

        return create_nixl_store(NixlOptions.read(config.options))
    if config.backend == "mooncake":
        from sglang.srt.mem_cache.storage.mooncake_store import MooncakeStore

        return MooncakeStore(MooncakeOptions.read(config.options))
    if config.backend == "lmcache":
        from sglang.srt.mem_cache.storage.lmcache_store import LMCacheStore

        return LMCacheStore(LMCacheOptions.read(config.options))
    return _import_store(dict(config.options))


def _import_store(options: dict[str, Any]) -> PrefixStore:
    flag = "--hicache-storage-backend dynamic"
    module, name = options.pop("module_path", None), options.pop("class_name", None)
    options.pop("backend_name", None)
    options.pop("interface_v1", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise UserError(
            f'{flag} needs --hicache-storage-backend-extra-config \'{{"module_path": "package.module", "class_name":'
            ' "Class"}\'.'
        )
    try:
        store_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{flag}: {module}.{name} cannot be imported: {error}.") from None
    missing = [method for method in METHODS if not callable(getattr(store_class, method, None))]
    if missing:
        raise UserError(
            f"{flag}: {module}.{name} has no {', '.join(missing)}. Its methods are those of"
            " sglang.srt.mem_cache.storage.store.PrefixStore; SGLang's HiCacheStorage is another interface."
        )
    try:
        store: PrefixStore = store_class(options)
    except UserError:
        raise
    except Exception as error:  # custom code may raise anything; the server does not start
        raise UserError(f"{flag}: {module}.{name} cannot be created: {error!r}.") from error
    return store
