"""Keys of --hicache-storage-backend-extra-config that belong to the backends nixl, mooncake and lmcache.

The names and their meaning are SGLang's, as far as SGLang has the backend. Reading them needs none of the libraries.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.environ import envs, parse_bytes
from sglang.srt.errors import UserError

FLAG = "--hicache-storage-backend-extra-config"
DEFAULT_TIMEOUT_S = 5.0
_PLUGIN = "posix"
_PARAMETERS = ("use_aio", "use_uring", "use_posix_aio", "ios_pool_size", "kernel_queue_size")
"""Parameters of NIXL's plugin POSIX."""
FILE_KEYS = ("storage_dir", "max_size", "min_free_space", "eviction_ratio")
"""Keys of the backend file, which nixl takes, too."""
NIXL_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The package for either CUDA, and the one for each."""
_LIBRARIES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "nixl": (NIXL_PACKAGES, "NIXL: pip install nixl-cu13, or nixl-cu12, as torch's CUDA is"),
    "mooncake": (
        ("mooncake",),
        "Mooncake: pip install mooncake-transfer-engine, and libibverbs (apt install libibverbs1)",
    ),
}
"""By backend: its packages, of which one is enough, and how to get it."""


def needed_library(backend: str) -> str:
    """Returns the beginning of a message about the library of a backend, which is missing."""
    return f"--hicache-storage-backend {backend} needs {_LIBRARIES[backend][1]}"


def refuse_missing_library(backend: str | None) -> None:
    """Raises UserError if no package of the backend's library is here, which is known without importing it."""
    packages, _ = _LIBRARIES.get(backend or "", ((), ""))
    if packages and not any(importlib.util.find_spec(package) for package in packages):
        raise UserError(f"{needed_library(str(backend))}.")


def refuse_unknown(options: Mapping[str, Any], known: Collection[str], backend: str) -> None:
    """Raises UserError for a key that the backend does not read."""
    if unknown := sorted(options.keys() - set(known)):
        raise UserError(
            f"{FLAG}: {', '.join(unknown)} means nothing to the backend {backend}; it reads {', '.join(sorted(known))}."
        )


def read_seconds(options: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a number of seconds, at least 0. Raises UserError."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UserError(f"{FLAG}: {key} must be a number of seconds; got {value!r}.")
    return float(value)


def read_timeout(options: Mapping[str, Any]) -> float:
    """Returns the seconds of a call. Raises UserError for 0, too: no server answers at once."""
    seconds = read_seconds(options, "timeout", DEFAULT_TIMEOUT_S)
    if not seconds:
        raise UserError(f"{FLAG}: timeout must be above 0.")
    return seconds


def read_size(options: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Returns a number of bytes, which may be written as 4GB. Raises UserError."""
    value = options.get(key)
    if value is None:
        return default
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise UserError(f"{FLAG}: {key}: {error}; got {value!r}.") from None


def _text(options: Mapping[str, Any], key: str, default: str) -> str:
    value = options.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{FLAG}: {key} must be a text; got {value!r}.")
    return value


def _switch(options: Mapping[str, Any], key: str, default: bool) -> bool:
    value = options.get(key, default)
    if str(value).lower() not in ("true", "false"):
        raise UserError(f"{FLAG}: {key} must be true or false; got {value!r}.")
    return str(value).lower() == "true"


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """Files that NIXL's plugin POSIX reads and writes."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the plugin."""
    free_share: float | None = None
    """Share of the file system that stays free; None: as for the backend file."""
    directory: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the backend file."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> NixlOptions:
        """Reads the keys of SGLang's configuration of NIXL, and those of the backend file. Raises UserError, for
        plugins other than POSIX, too."""
        cleaner = ("l3_cleaner_enabled", "l3_cleaner_high_watermark", "l3_cleaner_low_watermark")
        known = ("plugin", "use_direct_io", *cleaner, *FILE_KEYS)
        refuse_unknown(options, known if "plugin" in options else (*known, *_PARAMETERS), "nixl")
        _switch(options, "use_direct_io", True)  # entries are no whole sectors, and go through the system's cache
        directory = {key: options[key] for key in FILE_KEYS if key in options}
        return cls(_parameters_of(options), _free_share(options), directory)


def _parameters_of(options: Mapping[str, Any]) -> dict[str, str]:
    plugins = options.get("plugin")
    if plugins is None:
        name, given = (
            envs.SGLANG_HICACHE_NIXL_BACKEND_PLUGIN,
            {key: options[key] for key in _PARAMETERS if key in options},
        )
    elif isinstance(plugins, Mapping) and all(isinstance(each, Mapping) for each in plugins.values()):
        active = [key for key, each in plugins.items() if _switch(each, "active", False)]
        if not active and any(each.keys() - {"active"} for each in plugins.values()):
            raise UserError(f'{FLAG}: of plugin none is active, so that nothing reads its keys; add "active": true.')
        name = active[0] if active else envs.SGLANG_HICACHE_NIXL_BACKEND_PLUGIN
        given = {key: value for key, value in plugins.get(name, {}).items() if key != "active"}
    else:
        raise UserError(f'{FLAG}: plugin must be as {{"posix": {{"active": true}}}}; got {plugins!r}.')
    if name.lower() not in (_PLUGIN, "auto"):
        raise UserError(
            f"--hicache-storage-backend nixl: the plugin {name} is not supported, POSIX is: set"
            ' "plugin": {"posix": {"active": true}}, or SGLANG_HICACHE_NIXL_BACKEND_PLUGIN=POSIX.'
        )
    refuse_unknown(given, _PARAMETERS, "nixl's plugin POSIX")
    return {key: str(value).lower() for key, value in given.items()}


def _free_share(options: Mapping[str, Any]) -> float | None:
    """Returns what SGLang's watermarks mean: the least recently used entries go once the file system is fuller than the
    high one."""
    if not _switch(options, "l3_cleaner_enabled", True):
        return 0.0
    marks = [options.get(f"l3_cleaner_{which}_watermark") for which in ("high", "low")]
    for mark in marks:
        if mark is not None and (isinstance(mark, bool) or not isinstance(mark, int | float) or not 0 < mark <= 100):
            raise UserError(f"{FLAG}: the watermarks of l3_cleaner are above 0 and at most 100 percent; got {mark!r}.")
    high, low = marks
    if high is None:
        return None
    if low is not None and low > high:
        raise UserError(f"{FLAG}: l3_cleaner_low_watermark is above l3_cleaner_high_watermark.")
    return 1 - float(high) / 100


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """A client of a Mooncake store, and the memory that it gives to the store."""

    master: str
    metadata: str
    host: str
    protocol: str
    devices: str
    segment_bytes: int
    buffer_bytes: int
    """Of a client's own buffer, through which every entry goes."""
    timeout_s: float
    key: bytes

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> MooncakeOptions:
        """Reads the keys of SGLang's configuration of Mooncake; environment variables stand for what is not given.
        Raises UserError."""
        known = (
            "master_server_address", "metadata_server", "local_hostname", "protocol", "device_name",
            "global_segment_size", "local_buffer_size", "timeout", "key",
        )  # fmt: skip
        refuse_unknown(options, known, "mooncake")
        master = _text(options, "master_server_address", envs.MOONCAKE_MASTER)
        if not master:
            raise UserError(
                f'--hicache-storage-backend mooncake needs {FLAG} \'{{"master_server_address": "HOST:50051"}}\', or'
                " MOONCAKE_MASTER=HOST:50051."
            )
        _address(master, "master_server_address")
        protocol = _text(options, "protocol", envs.MOONCAKE_PROTOCOL)
        if protocol not in ("tcp", "rdma"):
            raise UserError(f"{FLAG}: protocol must be tcp or rdma; got {protocol!r}.")
        return cls(
            master,
            _text(options, "metadata_server", envs.MOONCAKE_TE_META_DATA_SERVER),
            _text(options, "local_hostname", envs.MOONCAKE_LOCAL_HOSTNAME),
            protocol,
            _text(options, "device_name", envs.MOONCAKE_DEVICE),
            read_size(options, "global_segment_size", envs.MOONCAKE_GLOBAL_SEGMENT_SIZE) or 0,
            read_size(options, "local_buffer_size", envs.MOONCAKE_LOCAL_BUFFER_SIZE) or 0,
            read_timeout(options),
            _text(options, "key", "").encode(),
        )

    @property
    def address(self) -> tuple[str, int]:
        """Returns host and port of the master."""
        return _address(self.master, "master_server_address")


@dataclass(frozen=True, slots=True)
class LMCacheOptions:
    """The address of an LMCache server."""

    address: tuple[str, int]
    timeout_s: float
    key: bytes

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> LMCacheOptions:
        """Reads `url`, the address in the form of LMCache's own `remote_url`, `timeout` and `key`. Raises UserError."""
        refuse_unknown(options, ("url", "timeout", "key"), "lmcache")
        url = _text(options, "url", "")
        if not url.startswith("lm://"):
            raise UserError(f'--hicache-storage-backend lmcache needs {FLAG} \'{{"url": "lm://HOST:PORT"}}\'.')
        address = _address(url.removeprefix("lm://"), "url")
        return cls(address, read_timeout(options), _text(options, "key", "").encode())


def _address(text: str, key: str) -> tuple[str, int]:
    host, _, port = text.rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{FLAG}: {key} must be HOST:PORT; got {text!r}.")
    return host.strip("[]"), int(port)
