"""Model directories that are made of other files, once, and kept in the cache. No torch."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.errors import UserError


def cached_folder(kind: str, name: str, form: int, files: Iterable[Path]) -> Path:
    """Returns where the cache has the model directory of these files, by their paths, sizes and times; `form`: number
    of the form of such directories. Raises UserError for a file that is not there."""
    facts: list[Any] = [form]
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from None
        facts.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return envs.SGLANG_CACHE_DIR / kind / f"{name[:64]}-{digest}"


def make_folder(folder: Path, index: str, source: Path, write: Callable[[Path], None]) -> None:
    """Makes a directory whose file `index` is there if all is: `write` fills it under another name, and whichever
    process is first gives it its own. Raises UserError if the cache cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            write(partial)
            partial.chmod(0o755)
            with suppress(OSError):  # another process was faster
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"The config and tokenizer of {source} cannot be written to {folder} ({error.strerror}). Name a directory"
            " that can be written with SGLANG_CACHE_DIR."
        ) from None
    if not (folder / index).is_file():
        raise UserError(f"{folder} cannot be made: something else has this name.")
