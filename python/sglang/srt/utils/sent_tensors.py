"""Tensors on their way from a trainer's process to a server of this machine: a file in shared memory, and a handle of
it that a request carries.

Only the user that the server runs as can make such a file, so the handle needs no key; whoever receives it removes the
file. What a trainer calls is `MultiprocessingSerializer`, by its name in SGLang.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FOLDER = Path("/dev/shm")
PREFIX = "sglang-sent-"
HANDLE = b"sglang-sent-file:"
FLAT, METADATA, BUCKET = "flattened_tensor", "metadata", "bucket"


def write_sent(tensors: Mapping[str, torch.Tensor], bucket: list[dict[str, Any]] | None = None) -> Path:
    """Writes tensors into a file that only this user can read. bucket: names, types, shapes and first bytes of those in
    a flat tensor; None: it is none."""
    from safetensors.torch import save_file

    said = None if bucket is None else {BUCKET: json.dumps(bucket)}
    path = FOLDER / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path, said)
    return path


def handle_of(path: Path) -> bytes:
    """Returns what a request carries in the place of a file's content."""
    return HANDLE + path.name.encode()


def sent_file(handle: bytes) -> Path | None:
    """Returns the file of a handle; None if the bytes are none. Raises ValueError for a file that is not there, or that
    another user may have written."""
    if not handle.startswith(HANDLE):
        return None
    name = handle[len(HANDLE) :].decode("ascii", "replace")
    path = FOLDER / name
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError("it names no file of sent tensors")
    try:
        status = os.lstat(path)
    except OSError:
        raise ValueError("its file is not on this machine, or was sent before") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError("its file is not of the user that the server runs as")
    return path


def parts_of(metadata: Iterable[Any], element_size: int) -> list[dict[str, Any]]:
    """Returns the entries of a flattened bucket. metadata: objects with name, dtype, shape and start_idx, in elements
    of the flat tensor."""
    return [
        {
            "name": part.name,
            "dtype": str(part.dtype).removeprefix("torch."),
            "shape": list(part.shape),
            "begin": part.start_idx * element_size,
        }
        for part in metadata
    ]


class MultiprocessingSerializer:
    """Hands tensors over to the server, without a pickle."""

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes | str:
        """Returns the handle of named tensors, or of a flattened bucket: a dict with `flattened_tensor` and `metadata`.
        output_str: in base64, as HTTP takes it."""
        named = dict(obj)
        metadata = named.pop(METADATA, None)
        bucket = None if metadata is None else parts_of(metadata, named[FLAT].element_size())
        handle = handle_of(write_sent(named, bucket))
        return base64.b64encode(handle).decode() if output_str else handle

    @staticmethod
    def deserialize(data: bytes | str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a handle, whose file stays."""
        from safetensors.torch import load_file

        path = sent_file(base64.b64decode(data) if isinstance(data, str) else data)
        if path is None:
            raise ValueError("only handles of sent tensors are read: a pickle can run code")
        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
