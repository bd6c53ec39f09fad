"""The adapters that --lora-paths names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import UserError

MAX_NAME = 256
MODULES_OF: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that SGLang names together."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter with the name that requests give. `pinned`: it keeps its place on the device."""

    name: str
    path: str
    pinned: bool = False

    @property
    def folder(self) -> Path:
        """Returns the directory that `path` names. Raises UserError if there is none."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"the adapter {self.name!r}: {self.path!r} is no directory here. Download it first (hf download)."
            )
        return folder


def named_adapters(entries: Sequence[str]) -> list[NamedAdapter]:
    """Returns the adapters of --lora-paths, each PATH, NAME=PATH or a JSON object. Raises UserError."""
    adapters = [_named(entry) for entry in entries]
    names = [adapter.name for adapter in adapters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--lora-paths names {twice!r} twice.")
    return adapters


def written(given: Any) -> Any:
    """Returns the words of --lora-paths for what `Engine` takes, too: an object of names and directories, or a list
    with objects as a word may be one. Other values stay."""
    if isinstance(given, dict):
        given = [{"lora_name": name, "lora_path": path} for name, path in given.items()]
    if not isinstance(given, list):
        return given
    return [json.dumps(each, default=str) if isinstance(each, dict) else each for each in given]  # of a `Path`, too


def _named(entry: str) -> NamedAdapter:
    if entry.lstrip().startswith("{"):
        return _from_json(entry)
    name, separator, path = entry.partition("=")
    return checked(NamedAdapter(name, path if separator else name))


def _from_json(entry: str) -> NamedAdapter:
    try:
        values = json.loads(entry)
        adapter = NamedAdapter(values["lora_name"], values["lora_path"], values.get("pinned") or False)
        if {*values} - {"lora_name", "lora_path", "pinned"} or type(adapter.pinned) is not bool:
            raise ValueError("its keys are lora_name, lora_path and pinned")
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"--lora-paths: {entry[:256]!r} is no description of an adapter: {error}.") from None
    return checked(adapter)


def checked(adapter: NamedAdapter) -> NamedAdapter:
    """Returns the adapter. Raises UserError for names that requests cannot give."""
    name, path = adapter.name, adapter.path
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise UserError(f"the name of an adapter must have 1 to {MAX_NAME} printable characters.")
    if not isinstance(path, str) or not path or "\0" in path:
        raise UserError(f"the adapter {name!r} needs a path.")
    return adapter
