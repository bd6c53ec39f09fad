"""The files of weights of a model directory: safetensors, checked against their index, or GGUF."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.checkpoint_header import CSF_EXCEPTIONS, CSF_FIXED, inside
from sglang.srt.configs.gguf.tensors import read_index
from sglang.srt.errors import UserError
from sglang.srt.model_loader.compressed_scales import ExpandedScales
from sglang.srt.model_loader.gguf_checkpoint import GGUFCheckpoint

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a model directory. `files` maps each file to the tensors that the index lists for it; None without
    an index."""

    files: dict[Path, frozenset[str] | None]

    def total_bytes(self) -> int:
        """Returns the size of all files."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns the files."""
        return tuple(self.files)

    def tensors(self, after: Callable[[Path], None] = lambda path: None) -> Iterator[tuple[str, Any, Any]]:
        """Yields (name, safetensors slice, open file), file by file, memory-mapped: nothing is read until it is
        indexed. Compressed scales come expanded, under the name of the scales. `after` is called with each file but the
        last, once a tensor of the next one has taken the place of its last."""
        left: Path | None = None
        for path, promised in self.files.items():
            with _open(path) as file:
                names = list(file.keys())
                _check_promises(path, promised, frozenset(names))
                for name in names:
                    if name.endswith(CSF_FIXED):
                        scales = ExpandedScales(name, functools.partial(self._file_of, file, names))
                        yield scales.name, scales, scales
                        del scales
                    elif not name.endswith(CSF_EXCEPTIONS):
                        yield name, file.get_slice(name), file
                    else:
                        continue
                    if left is not None:
                        after(left)
                        left = None
            left = path

    def _file_of(self, current: Any, names: Collection[str], name: str) -> Any:
        """Returns the open file that has the tensor: the current one, or another that the index names; None if there is
        none."""
        if name in names:
            return current
        path = next((path for path, promised in self.files.items() if name in (promised or ())), None)
        return None if path is None else _open(path)


Weights: TypeAlias = Checkpoint | GGUFCheckpoint
"""The weights of a model directory: their size, and an iterator over tensors that are read when they are indexed."""


def find_checkpoint(
    model_path: str,
    dtype: torch.dtype = torch.float32,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Weights:
    """Returns the files of a model directory: those of the index, or one model.safetensors, or a model in GGUF, of
    which `dtype` and `wanted` say how it is read. Raises UserError."""
    folder = Path(model_path)
    in_gguf = read_index(folder)
    if in_gguf is not None:
        return GGUFCheckpoint(folder, in_gguf, dtype, wanted)
    if (folder / INDEX_NAME).is_file():
        return _indexed(folder)
    if (folder / SINGLE_NAME).is_file():
        return Checkpoint({folder / SINGLE_NAME: None})
    names = sorted(p.name for p in folder.glob("*.safetensors")) or sorted(p.name for p in folder.glob("*.bin"))
    hint = f"; it has {', '.join(names[:5])}" if names else ""
    raise UserError(
        f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}{hint}. Only weights in safetensors or GGUF can be loaded "
        "(--load-format dummy starts with random ones)"
    )


def _indexed(folder: Path) -> Checkpoint:
    path = folder / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:  # bytes that are no text among them
        raise UserError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{path} has no 'weight_map' from tensor names to file names")
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        promised.setdefault(inside(file, path), set()).add(name)
    missing = [file for file in promised if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{path} names files that do not exist: {format_names(missing)}. Is the download complete?")
    return Checkpoint({folder / file: frozenset(names) for file, names in sorted(promised.items())})


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise UserError(f"{INDEX_NAME} has the entry {key!r} twice")
        seen[key] = value
    return seen


def _check_promises(path: Path, promised: frozenset[str] | None, names: frozenset[str]) -> None:
    if promised is None or promised == names:
        return
    if promised - names:
        raise UserError(f"{path} lacks tensors that {INDEX_NAME} promises there: {format_names(promised - names)}")
    raise UserError(f"{path} has tensors that {INDEX_NAME} does not name there: {format_names(names - promised)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}). Is the download complete?") from error


def format_names(names: Any) -> str:
    """Formats up to 10 names in order, with the total number if there are more."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:10])
    return shown if len(ordered) <= 10 else f"{shown}, ... ({len(ordered)} in total)"
