"""Reads names and dtypes of a checkpoint's tensors from the headers of its safetensors files, or from the index of a
model in GGUF. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from sglang.srt.configs.gguf.tensors import INDEX_NAME as GGUF_INDEX
from sglang.srt.configs.gguf.tensors import read_index, stored_parts
from sglang.srt.errors import UserError

_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 30
CSF_FIXED, CSF_EXCEPTIONS = "_csf_fixed", "_csf_exceptions"
"""How the names of the two tensors end in which compressed block scales are (`model_loader/compressed_scales`)."""
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's entry in a header; `dtype` as safetensors names it ("BF16")."""

    dtype: str
    shape: tuple[int, ...]


def stored_dtypes(folder: Path, wanted: Callable[[str], bool]) -> Mapping[str, str] | None:
    """Returns the dtypes of the tensors for whose names `wanted` is true; None: `folder` has no weights. Raises
    UserError for damaged files."""
    tensors = stored_tensors(folder, wanted)
    return None if tensors is None else {name: tensor.dtype for name, tensor in tensors.items()}


def stored_tensors(folder: Path, wanted: Callable[[str], bool]) -> Mapping[str, Stored] | None:
    """Returns dtypes and shapes of the tensors for whose names `wanted` is true; None and errors as in
    `stored_dtypes`."""
    index = read_index(folder)
    if index is not None:
        return {part.name: Stored(part.dtype, part.shape) for part in stored_parts(index) if wanted(part.name)}
    files = _indexed(folder)
    if files is not None:
        names = sorted({file for name, file in files.items() if wanted(name)})
    else:
        names = [SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else []
        if not names:
            return None
    headers = (file_tensors(folder / name) for name in names if (folder / name).is_file())
    return {name: tensor for header in headers for name, tensor in header.items() if wanted(name)}


def expanded_name(name: str) -> str:
    """Returns the name of the scales that a compressed tensor holds, or the name as it is."""
    return name.rpartition(".")[0] if name.endswith((CSF_FIXED, CSF_EXCEPTIONS)) else name


def stored_names(folder: Path) -> Mapping[str, str] | None:
    """Returns the names of all tensors, with their dtypes or "" where the names come from the index: hundreds of
    thousands of dtypes take seconds to read. None and errors as in `stored_dtypes`."""
    files = None if (folder / GGUF_INDEX).is_file() else _indexed(folder)
    return stored_dtypes(folder, lambda name: True) if files is None else dict.fromkeys(files, "")


def _indexed(folder: Path) -> Mapping[str, str] | None:
    """Returns the file of each tensor; None: there is no index. Raises UserError for a malformed one."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): inside(str(file), index) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: {error!r}.") from None


def inside(file: str, index: Path) -> str:
    """Returns `file`, the name of a file of weights. Raises UserError if it is outside of the checkpoint's directory:
    such a name could make the server read any file of the machine."""
    parts = PurePath(file).parts
    if not parts or PurePath(file).is_absolute() or ".." in parts:
        raise UserError(f"{index}: weight_map names {file[:256]!r}, which is no file below the index's own directory.")
    return file


def header_bytes(path: Path, longest: int = _LONGEST_HEADER) -> bytes:
    """Returns the header of a safetensors file, JSON that has not been checked. Raises UserError, also for a header of
    `longest` bytes or more."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length < longest:
                raise ValueError(f"a header of {length} bytes")
            return file.read(length)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a readable safetensors file ({error}). Is the download complete?")


def file_tensors(path: Path, longest: int = _LONGEST_HEADER) -> dict[str, Stored]:
    """Returns type and shape of each tensor in a file, by name. Raises UserError for a damaged file, and for a
    header of `longest` bytes or more."""
    header_text = header_bytes(path, longest)
    try:
        header = json.loads(header_text)
        return {
            name: Stored(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from None
