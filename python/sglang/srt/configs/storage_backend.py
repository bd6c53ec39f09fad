"""Reads the flags of the storage for cached prefixes beyond main memory (--hicache-storage-backend)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sglang.srt.configs.storage_options import FILE_KEYS, LMCacheOptions, MooncakeOptions, NixlOptions, refuse_unknown
from sglang.srt.errors import UserError

BACKENDS = ("file", "nixl", "mooncake", "lmcache", "dynamic")
OTHER_BACKENDS = (
    "hf3fs", "aibrix", "shm", "seaweedfs", "eic", "simm", "mori", "tensorcast", "npu_memcache", "sim",
)  # fmt: skip
"""SGLang's other backends, which are refused with a message."""
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
_NUMBERS = {"prefetch_threshold": 256, "prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.25}
"""Keys of the extra configuration that are no backend's, with their defaults."""
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The storage backend of cached prefixes, and when a request waits for it."""

    backend: str
    prefetch_policy: str
    prefetch_threshold: int
    """Fewest tokens that a request must be able to save for a look-up."""
    timeout_base: float
    """Seconds that a request waits with the policy "timeout", to which `timeout_per_ki_token` adds."""
    timeout_per_ki_token: float
    """Seconds for each 1,024 tokens."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The backend's own keys."""
    rank_bytes: int = 0
    """Main memory that the backend's library takes in each rank's process."""

    def timeout(self, num_tokens: int) -> float:
        """Returns the seconds that a request waits for `num_tokens` tokens with the policy "timeout"."""
        return self.timeout_base + self.timeout_per_ki_token * num_tokens / 1024

    def describe(self) -> dict[str, Any]:
        """Describes it for /server_info, without the backend's own keys, which may include a password."""
        return {
            "backend": self.backend,
            "prefetch_policy": self.prefetch_policy,
            "prefetch_threshold": self.prefetch_threshold,
        }


def read_storage_config(backend: str | None, policy: str, extra: str | None) -> StorageConfig | None:
    """Reads the flags; None without a backend. `extra`: JSON, or @ and the path of a JSON, YAML or TOML file. Raises
    UserError for what cannot be read."""
    if backend is None:
        return None
    options = _read_options(extra) if extra else {}
    numbers = {key: _number(key, options.pop(key, default)) for key, default in _NUMBERS.items()}
    options.pop("hicache_storage_pass_prefix_keys", None)  # keys here always stand for whole prefixes
    return StorageConfig(
        backend,
        policy,
        max(1, int(numbers["prefetch_threshold"])),
        numbers["prefetch_timeout_base"],
        numbers["prefetch_timeout_per_ki_token"],
        options,
        _checked_bytes(backend, options),
    )


def _checked_bytes(backend: str, options: Mapping[str, Any]) -> int:
    """Checks the keys of the backends whose keys are known without opening the store. Returns `rank_bytes`. Raises
    UserError."""
    if backend == "file":
        refuse_unknown(options, FILE_KEYS, backend)
    elif backend == "nixl":
        NixlOptions.read(options)
    elif backend == "lmcache":
        LMCacheOptions.read(options)
    elif backend == "mooncake":
        mooncake = MooncakeOptions.read(options)
        return mooncake.segment_bytes + mooncake.buffer_bytes
    return 0


def _read_options(text: str) -> dict[str, Any]:
    source, suffix = "--hicache-storage-backend-extra-config", ".json"
    if text.startswith("@"):
        path = Path(text[1:]).expanduser()
        source, suffix = f"{source} {text}", path.suffix.lower()
        try:
            if os.path.getsize(path) > _MAX_CONFIG_BYTES:
                raise UserError(f"{source}: the file is larger than {_MAX_CONFIG_BYTES:,} bytes.")
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read: {error}.") from None
    read = {".toml": _read_toml, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}.get(suffix, json.loads)
    try:
        options = read(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{source} cannot be parsed: {error}") from None
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise UserError(f'{source} takes an object, such as {{"prefetch_threshold": 256}}.')
    return options


def _read_toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError:
        raise ValueError("TOML needs Python 3.11; write JSON or YAML") from None
    return tomllib.loads(text)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UserError(f"--hicache-storage-backend-extra-config: {key} must be a number of at least 0; got {value!r}.")
    return float(value)
