"""Finds the files of a model in GGUF: one, or all parts of a split one. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.configs.gguf.header import Header, TensorInfo, read_header
from sglang.srt.errors import UserError

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MAXPARTS = 1000


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The files of a model. `metadata` is that of the first one."""

    headers: tuple[Header, ...]

    @property
    def path(self) -> Path:
        """Returns the first file."""
        return self.headers[0].path

    def tensors(self) -> dict[str, tuple[int, TensorInfo]]:
        """Returns all tensors by name, each with the number of its file."""
        return {tensor.name: (i, tensor) for i, header in enumerate(self.headers) for tensor in header.tensors}


def model_files(path: Path) -> list[Path]:
    """Returns the files of the model of which `path` is the only or any part. Raises UserError if some are missing."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAXPARTS:
        raise UserError(f"{path} calls itself part {int(match['number'])} of {count}.")
    files = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}{path.suffix}") for i in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UserError(f"{path.parent} lacks parts of the model: {', '.join(missing[:5])}{more}.")
    return files


def in_folder(folder: Path) -> Path | None:
    """Returns the first file of the model in GGUF that the folder holds; None: it holds none, or other weights. Raises
    UserError if it holds several models. Files of image encoders (mmproj) are not counted."""
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if "mmproj" not in path.name.lower())
    models = {model_of(path): path for path in reversed(files)}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models.values())[:8])
        raise UserError(f"{folder} holds {len(models)} models in GGUF: {names}. Give the path of one of them.")
    return next(iter(models.values()), None)


def model_of(path: Path) -> str:
    """Returns what the names of all files of a model have in common."""
    match = PART.fullmatch(path.name)
    return f"{match['stem']}-of-{match['count']}" if match else path.name


def read_model(files: Sequence[Path]) -> GGUFModel:
    """Reads the headers of a model's files. Raises UserError if one is damaged, or they do not belong together."""
    headers = tuple(read_header(path) for path in files)
    first = headers[0].metadata
    for i, header in enumerate(headers):
        number, count = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1) or 1
        if (number, count) != (i, len(headers)):
            raise UserError(
                f"{header.path} is part {number} (counted from 0) of {count} according to split.no and split.count, but"
                f" it was taken for part {i} of {len(headers)}. Do its name and those of the other parts fit?"
            )
    model = GGUFModel(headers)
    total = sum(len(header.tensors) for header in headers)
    if len(model.tensors()) < total:
        raise UserError(f"{files[0]}: parts of the model hold the same tensor.")
    if len(headers) > 1 and first.get("split.tensors.count", total) != total:
        raise UserError(
            f"{files[0]}: split.tensors.count is {first['split.tensors.count']}, but the parts hold {total}."
        )
    return model
