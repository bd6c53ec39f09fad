"""Launches that fall back to smaller tiles: if a tile asks for more than the GPU has (another Triton, an unknown card),
the next ledger tile takes over, for this process and for later ones.

    fallbacks = fallbacks_of("linear/fp8_block", config, __name__)
    fallbacks.run(lambda tiles: many_rows(..., tiles[0]))
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sglang.srt.environ import envs
from sglang.srt.hardware.arch import device_name
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.tile_configs import TileConfig, Tiles, tiles_key

R = TypeVar("R")
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepDown:
    """A tile that failed to launch, and the one used instead."""

    op: str
    failed: str
    used: str
    reason: str


_step_downs: list[StepDown] = []
_in_use: dict[str, str] = {}
"""The tile that each op and first tile goes on with, of the call sites that were used."""


def step_downs() -> list[dict[str, str]]:
    """Returns all fallbacks to smaller tiles of this process, including those remembered from earlier ones, for
    /server_info."""
    return [asdict(s) for s in _step_downs]


def tiles_in_use() -> dict[str, str]:
    """Returns the tile in use for each op and first tile of this process."""
    return dict(_in_use)


class FallbackTiles(Generic[T]):
    """The tiles of one call site, best first. One instance per call site and process; not thread safe.

    A failed attempt has launched nothing of the kernel that failed: Triton compiles it and compares its needs with the
    GPU beforehand. That is no stream operation, so it may happen during CUDA graph capture. Launches that came earlier
    in the same attempt are repeated, so an attempt must be repeatable.
    """

    def __init__(self, op: str, tiles: Sequence[T], *modules: str, key: Callable[[Any], str] = tile_key) -> None:
        """Takes the tiles, and the `modules` that hold the kernel: a remembered failure counts only for their present
        source. `key`: makes the name of a tile for logs and for what is remembered."""
        assert tiles, f"{op}: a list of fallback tiles needs at least one tile"
        self.op = op
        self.tiles = tuple(tiles)
        self._modules = modules
        self._keys = [key(tile) for tile in self.tiles]
        self._name = f"{op}, planned with tile {self._keys[0]}"
        self._at = 0
        self._recalled = False

    @property
    def tile(self) -> T:
        """The tile in use."""
        if not self._recalled:
            self._recall()
        return self.tiles[self._at]

    def run(self, attempt: Callable[[T], R]) -> R:
        """Returns `attempt(tile)`, retried with the next smaller tile whenever Triton refuses one. Raises the last
        error when no tile is left."""
        while True:
            tile = self.tile
            try:
                return attempt(tile)
            except Exception as error:
                if not _is_for_the_tile(error) or self._at + 1 == len(self.tiles):
                    raise
                self._step_down(str(error))

    def _step_down(self, reason: str) -> None:
        failed, used = self._keys[self._at], self._keys[self._at + 1]
        logger.warning("%s: tile %s does not launch (%s); using tile %s from now on", self.op, failed, reason, used)
        self._at += 1
        _in_use[self._name] = used
        step = StepDown(self.op, failed, used, reason)
        _step_downs.append(step)
        if not _KILLED.search(reason):
            _remember(_cache_key(*self._modules), step)

    def _recall(self) -> None:
        self._recalled = True
        for step in _remembered(_cache_key(*self._modules)):
            # Tile configs of an op may share tiles: only a failure of the tile in use here counts.
            if step.op == self.op and step.failed == self._keys[self._at] and step.used in self._keys[self._at + 1 :]:
                self._at = self._keys.index(step.used)
                if step in _step_downs:
                    continue
                _step_downs.append(step)
                logger.warning(
                    "%s: using tile %s, as %s failed before (%s)", step.op, step.used, step.failed, step.reason
                )
        _in_use.setdefault(self._name, self._keys[self._at])


_fallbacks: dict[tuple[str, tuple[str, ...]], FallbackTiles[Tiles]] = {}


def fallbacks_of(op: str, config: TileConfig, *modules: str) -> FallbackTiles[Tiles]:
    """Returns the fallback tiles of a tile config. Call sites of one op with equal tiles share them, so that each tile
    fails once in a process."""
    key = op, config.names
    if key not in _fallbacks:
        _fallbacks[key] = FallbackTiles(op, config.candidates, *modules, key=tiles_key)
    return _fallbacks[key]


_TILE_ERRORS = frozenset({"OutOfResources", "CompilationError", "PTXASError"})
_KILLED = re.compile(r"error code (-9|137)\b")
"""Part of Triton's message where ptxas was killed, as Linux does without free memory: no fact about the tile."""


def _is_for_the_tile(error: BaseException) -> bool:
    """Returns whether Triton refuses the kernel with this tile: it needs more shared memory or registers than the GPU
    has, or does not compile."""
    return any(kind.__name__ in _TILE_ERRORS for kind in type(error).__mro__)


def _cache_file() -> Path:
    return envs.SGLANG_CACHE_DIR / "step_downs.json"


@functools.cache
def _cache_key(*modules: str) -> str:
    """Returns a key of kernel source, Triton version and GPU: if any of them changes, a failed tile is tried again."""
    source = b"".join(map(_source, modules))
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "none"
    return f"{hashlib.sha256(source).hexdigest()[:16]}/{triton_version}/{device_name()}"


def _source(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_bytes() if spec and spec.origin else module.encode()


def _read_cache() -> dict[str, list[dict[str, str]]]:
    path = _cache_file()
    if not path.exists():
        return {}
    try:
        content: dict[str, list[dict[str, str]]] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        logger.warning("ignoring %s, which is not valid JSON: %s", path, error)
        return {}
    return content


def _remembered(key: str) -> list[StepDown]:
    return [StepDown(**step) for step in _read_cache().get(key, [])]


def _remember(key: str, step: StepDown) -> None:
    """Remembers a fallback for later processes. A launch that has found its tile must not fail because of an unwritable
    file."""
    try:
        _write(key, step)
    except OSError as error:
        logger.warning("%s: tile %s is not remembered for later processes: %s", step.op, step.used, error)


def _write(key: str, step: StepDown) -> None:
    """Adds `step` to the file. Ranks fall back at the same time, so a lock makes them read, change and replace the file
    in turn."""
    path = _cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        content = _read_cache()
        steps = content.setdefault(key, [])
        if asdict(step) in steps:  # another rank was first
            return
        steps.append(asdict(step))
        replacement = path.with_suffix(f".{os.getpid()}")
        replacement.write_text(json.dumps(content, indent=1))
        replacement.replace(path)
