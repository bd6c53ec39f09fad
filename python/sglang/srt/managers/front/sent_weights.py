"""Tensors as clients send them: in base64 the bytes of a safetensors file, or the handle of one on this machine."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.utils import sent_tensors

MAX_NAMES, MAX_NAME, MAX_DIMS = 1 << 16, 512, 8
MAX_BYTES = 1 << 36
"""Bytes of the tensors of one call."""
MAX_HEADER = 1 << 26
MAX_HANDLE = 1024
"""Characters of a handle; longer strings are contents."""
PIECE = 1 << 24  # divisible by 4
PICKLES = (b"\x80", b"PK\x03\x04")
BUCKET, FLAT = "flattened_bucket", sent_tensors.FLAT
LOAD_FORMATS = (None, "auto", "direct", BUCKET)


class BucketEntry(msgspec.Struct):
    """One tensor of a flattened bucket. `begin`: its first byte."""

    name: str
    dtype: str
    shape: list[int]
    begin: int


class Sent(NamedTuple):
    """What a client has sent: files, one for all ranks of tensor parallelism or one for each. bucket: the tensors in a
    flat one; None: it is none."""

    files: list[Path]
    bucket: list[dict[str, Any]] | None


def check_specs(tensors: list[tuple[str, str, list[int]]]) -> None:
    """Raises RequestError for tensors that no model has."""
    if not 0 < len(tensors) <= MAX_NAMES or len({name for name, *_ in tensors}) != len(tensors):
        raise RequestError(f"names must be 1 to {MAX_NAMES} different ones")
    total = 0
    for name, _, shape in tensors:
        if len(name) > MAX_NAME or len(shape) > MAX_DIMS or not all(0 < size <= MAX_BYTES for size in shape):
            raise RequestError(f"{name[:80]!r} is no name or has no shape of a weight")
        elements = 1
        for size in shape:
            elements *= size
        total += elements
    if total > MAX_BYTES:
        raise RequestError(f"{total} elements in one call; at most {MAX_BYTES}")


def problem_of_sender(serialized: Sequence[str], otherwise: str) -> str:
    """Returns "" if all are handles of files, which only the user that the server runs as can make; what is wrong with
    one of them; `otherwise` for contents, which anybody can send."""
    try:
        return "" if all(_sent_file(each) is not None for each in serialized) else otherwise
    except RequestError as error:
        return error.message


@asynccontextmanager
async def received(serialized: Sequence[str], load_format: str | None) -> AsyncIterator[Sent]:
    """Yields what a client has sent in base64, and removes its files afterwards. Raises RequestError, also for a
    pickle."""
    paths = [_sent_file(each) for each in serialized]
    try:
        contents = [partial(_decode, each) for each, path in zip(serialized, paths, strict=True) if path is None]
        async with written(contents) as files:
            rest = iter(files)
            ordered = [next(rest) if path is None else path for path in paths]
            bucket = await asyncio.to_thread(_bucket_of, ordered[0]) if load_format == BUCKET else None
            yield Sent(ordered, bucket)
    finally:
        for path in filter(None, paths):
            path.unlink(missing_ok=True)


@asynccontextmanager
async def written(contents: Sequence[Callable[[Path], None]]) -> AsyncIterator[list[Path]]:
    """Yields files that these have written in threads, in memory where the system has such a place."""
    shared = sent_tensors.FOLDER
    prefix = f"{sent_tensors.PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=shared if shared.is_dir() else None) as folder:
        files = [Path(folder) / str(i) for i in range(len(contents))]
        for file, write in zip(files, contents, strict=True):
            await asyncio.to_thread(write, file)
        yield files


def _from_base64(serialized: str) -> bytes:
    try:
        return base64.b64decode(serialized, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"serialized_named_tensors must be base64: {error}") from None


def _sent_file(serialized: str) -> Path | None:
    """Returns the file that a handle names; None for the content of one."""
    if len(serialized) > MAX_HANDLE:
        return None
    handle = _from_base64(serialized)
    try:
        return sent_tensors.sent_file(handle)
    except ValueError as error:
        raise RequestError(f"serialized_named_tensors holds a handle, but {error}") from None


def _decode(serialized: str, file: Path) -> None:
    """Writes the bytes of a safetensors file, piece by piece, as decoding lets no other thread run."""
    with file.open("wb") as out:
        for begin in range(0, len(serialized), PIECE):
            data = _from_base64(serialized[begin : begin + PIECE])
            if not begin and data.startswith(PICKLES):
                raise RequestError(
                    "serialized_named_tensors holds a pickle, which can run code and is not read: send the bytes of a"
                    " safetensors file (safetensors.torch.save) in base64, call Engine.update_weights_from_tensor with"
                    " the tensors themselves, or use /update_weights_from_distributed"
                )
            out.write(data)


def _bucket_of(path: Path) -> list[dict[str, Any]]:
    """Returns what a safetensors file with a flattened bucket says of its tensors. Raises RequestError."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(MAX_HEADER, int.from_bytes(file.read(8), "little"))))
        entries = json.loads(header["__metadata__"][sent_tensors.BUCKET])
        bucket = msgspec.convert(entries, list[BucketEntry])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise RequestError(
            f"a flattened bucket needs the tensor {FLAT!r}, and in the metadata `bucket` a JSON list of name, dtype,"
            f" shape and begin (in bytes): {error!r}"
        ) from None
    check_specs([(entry.name, entry.dtype, entry.shape or [1]) for entry in bucket])
    return [msgspec.structs.asdict(entry) for entry in bucket]
