"""The files of measured times: `measured/` of the cache has one for each setting. No torch, no Triton.

A file is replaced as a whole, under a lock, so that a reader sees all of one or all of the next, and of two servers
that measure at once neither loses what the other found. A cache that cannot be written costs the records and nothing
else.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.kernels.measured.records import Record, Records, Setting, by_key, from_bytes, to_bytes

logger = logging.getLogger(__name__)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")


def path_of(setting: Setting) -> Path:
    """Returns the path of a setting's file. Two settings may share a name: what the file says decides."""
    parts = (
        *(setting.gpu, setting.driver, setting.triton, f"{setting.version}.{setting.kernels}"),
        *(f"{setting.power_limit}W", setting.clocks),
    )
    name = "-".join(_NOT_IN_NAMES.sub("_", part).strip("_") for part in parts)
    return envs.SGLANG_CACHE_DIR / "measured" / f"{name[:200]}.json"


def anything_measured() -> bool:
    """Returns whether the cache has a file of any setting."""
    folder = envs.SGLANG_CACHE_DIR / "measured"
    try:
        return any(path.suffix == ".json" for path in folder.iterdir())
    except OSError:
        return False


def read(setting: Setting) -> Records:
    """Returns the records of a setting. A file that is bad, or of another setting, is left alone, with a line in the
    log."""
    path = path_of(setting)
    try:
        file = from_bytes(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is not read: %s", path, error)
        return {}
    if file.setting != setting:
        logger.warning("%s is not read: it was measured with another setting", path)
        return {}
    return by_key(file)


def why_not_kept(setting: Setting) -> str | None:
    """Returns why records of a setting cannot be kept; None if they can. Measuring would be in vain."""
    try:
        folder = path_of(setting).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
            file.flush()
    except OSError as error:
        return str(error)
    return None


def add(setting: Setting, records: Iterable[Record]) -> str | None:
    """Adds records to the file of a setting, in the place of older ones of the same questions and candidates. Returns
    why they could not be kept; None if they are."""
    path = path_of(setting)
    new = {(record.question, record.candidate): record for record in records}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
            _replace(path, to_bytes(setting, {**read(setting), **new}))
    except OSError as error:
        return str(error)
    return None


def _replace(path: Path, content: bytes) -> None:
    """Replaces a file; what fails half-way leaves the old one, and nothing beside it."""
    descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
