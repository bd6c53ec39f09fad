"""Reads how a repository makes embeddings of hidden states: modules.json and the files that it names, in the form of
sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader, read_json_object
from sglang.srt.errors import UserError

FIRST, LAST, MEAN = "first", "last", "mean"
"""Which hidden states of a text make its embedding: of the first token, of the last one, or the mean of all."""
_BY_FLAG = {
    "pooling_mode_cls_token": FIRST,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
}
_BY_NAME = {"cls": FIRST, "lasttoken": LAST, "mean": MEAN}
_FLAGS = "pooling_mode_"
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer [rows, cols] behind the pooling. folder: in the repository, with its weights; activation: behind
    the layer; "": none."""

    folder: str
    rows: int
    cols: int
    bias: bool
    activation: str = ""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What a repository does with hidden states. method: FIRST, LAST, MEAN, or "" where no file says it. max_tokens: of
    a text; 0: what the model takes."""

    method: str = ""
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = True
    max_tokens: int = 0


NO_MODULES = SentenceModules()


def read_sentence_modules(directory: Path) -> SentenceModules:
    """Returns what modules.json of a repository says; without that file nothing, and embeddings have length 1. Raises
    UserError for modules that are not computed here."""
    path = directory / "modules.json"
    if not path.is_file():
        return NO_MODULES
    method, dense, normalizes, max_tokens = "", [], False, 0
    for entry in _entries(path):
        kind, folder = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path") or "")
        if ".." in Path(folder).parts or Path(folder).is_absolute():
            raise UserError(f"{path}: the path {folder!r} leads out of the repository.")
        if kind == "Transformer":
            max_tokens = _max_tokens(directory / folder)
        elif kind == "Pooling":
            method = _method(directory / folder / "config.json")
        elif kind == "Dense":
            dense.append(_dense(directory, folder))
        elif kind == "Normalize":
            normalizes = True
        else:
            raise UserError(f"{path}: modules of the type {kind} are not computed here.")
    return SentenceModules(method, tuple(dense), normalizes, max_tokens)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} must hold a list of modules.")
    return entries


def _max_tokens(folder: Path) -> int:
    path = folder / "sentence_bert_config.json"
    return ConfigReader(read_json_object(path), str(path)).count("max_seq_length") if path.is_file() else 0


def _method(path: Path) -> str:
    values = read_json_object(path)
    named = values.get("pooling_mode")
    if isinstance(named, str):
        asked = {named: _BY_NAME.get(named, "")}
    else:
        asked = {flag: _BY_FLAG.get(flag, "") for flag, on in values.items() if flag.startswith(_FLAGS) and on is True}
    if len(asked) != 1 or "" in asked.values():
        said = ", ".join(name.removeprefix(_FLAGS) for name in asked) or "no mode"
        raise UserError(f"{path}: pooling by {said} is not computed here; cls_token, lasttoken and mean_tokens are.")
    return next(iter(asked.values()))


def _dense(directory: Path, folder: str) -> DenseModule:
    path = directory / folder / "config.json"
    keys = ConfigReader(read_json_object(path), str(path))
    name = keys.default("activation_function", str, "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UserError(f"{path}: the activation {name} is not computed here.")
    return DenseModule(
        folder,
        keys.positive("out_features"),
        keys.positive("in_features"),
        keys.default("bias", bool, True),
        _ACTIVATIONS[name],
    )
