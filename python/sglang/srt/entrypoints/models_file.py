"""The models of a server that has several: a YAML file with their flags, or a folder of models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from sglang.srt.configs.gguf.files import PART
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

MODEL_KEYS = frozenset({"flags", "aliases", "ttl"})
KEYS = frozenset({"models", "max_awake", "min_stay", "max_waiting"})
OF_THE_SERVER = ("host", "port", "api_key", "admin_api_key", "allowed_origins", "log_level", "log_level_http")
"""Options that all models share: they are given once, beside --models."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the file."""

    name: str
    args: ServerArgs
    aliases: tuple[str, ...] = ()
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """What the file says."""

    models: tuple[NamedModel, ...]
    max_awake: int = 1
    min_stay_s: float = 1.0
    max_waiting: int = 256


def read_models(path: str, common: Sequence[str], prog: str) -> ModelsFile:
    """Reads a file, or takes each model below a folder. common: flags of all models. Raises UserError."""
    place = Path(path).expanduser()
    if place.is_dir():
        said: Any = {"models": {name: {"flags": {}} for name in _models_below(place)}}
        beside = _models_below(place)
    else:
        try:
            said = yaml.safe_load(place.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"--models {path} cannot be read: {error}") from None
        beside = _models_below(place.parent)
    if not isinstance(said, dict) or not isinstance(said.get("models"), dict) or not said["models"]:
        raise UserError(f"--models {path}: there must be `models`, an object of names and what each of them is")
    _refuse_unknown(said, KEYS, "the file")
    shared = ServerArgs.from_cli([*common, "--model-path", "none"], prog)
    models = tuple(
        _model(str(name), each, beside.get(str(name)), common, shared, prog) for name, each in said["models"].items()
    )
    names = [name for model in models for name in (model.name, *model.aliases)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--models {path}: two models have the name {twice!r}")
    return ModelsFile(
        models,
        _count(said, "max_awake", 1),
        _number(said, "min_stay", 1.0),
        _count(said, "max_waiting", 256),
    )


def _models_below(folder: Path) -> dict[str, Path]:
    """Returns the models of a folder by name: folders with a model, and files in GGUF, of which all parts are one."""
    folders = {path.parent for pattern in ("*/config.json", "*/*.gguf") for path in folder.glob(pattern)}
    models = {each.name: each for each in sorted(folders)}
    for path in sorted(folder.glob("*.gguf"), reverse=True):
        if "mmproj" not in path.name.lower():  # an encoder of images belongs to another file
            part = PART.fullmatch(path.name)
            models[path.stem if part is None else part["stem"]] = path
    return models


def _model(
    name: str, said: Any, beside: Path | None, common: Sequence[str], shared: ServerArgs, prog: str
) -> NamedModel:
    """Returns a model of the file. beside: the model of this name in the file's folder; None: there is none."""
    said = {} if said is None else said
    flags = {} if not isinstance(said, dict) or said.get("flags") is None else said["flags"]
    if not isinstance(said, dict) or not isinstance(flags, dict):
        raise UserError(f"the model {name!r} of --models must be an object, whose `flags` are one of names and values")
    _refuse_unknown(said, MODEL_KEYS, f"the model {name!r}")
    words = [word for flag, value in flags.items() for word in _words(str(flag), value)]
    if not {f"--{name}" for name in ("model-path", "model", "config")} & {word.partition("=")[0] for word in words}:
        if beside is None:
            raise UserError(
                f"the model {name!r} of --models has no model-path among its flags, and beside the file there is no"
                f" folder of this name with a model, and no {name}.gguf"
            )
        words += ["--model-path", str(beside)]
    try:
        args = ServerArgs.from_cli([*common, *words], prog)
    except UserError as error:
        raise UserError(f"the model {name!r} of --models: {error}") from None
    clash = next((field for field in OF_THE_SERVER if getattr(args, field) != getattr(shared, field)), None)
    if clash is not None:
        flag = f"--{clash.replace('_', '-')}"
        raise UserError(f"the model {name!r} of --models: {flag} is of the whole server; give it beside --models")
    if args.node_rank or args.nnodes > 1 or args.use_ray or args.attn_dp_size > 1:
        raise UserError(f"the model {name!r} of --models: --nnodes, --use-ray and --attn-dp-size do not go with it")
    args = replace(args, served_model_name=name, enable_memory_saver=True, enable_weights_cpu_backup=True)
    args = replace(args, wake_on_request=False)
    aliases = said.get("aliases") or []
    if not isinstance(aliases, list):
        raise UserError(f"the model {name!r} of --models: aliases is a list")
    return NamedModel(name, args, tuple(map(str, aliases)), _number(said, "ttl", 0.0))


def _words(flag: str, value: Any) -> list[str]:
    """Returns a flag as words of a command line."""
    word = f"--{flag.removeprefix('--').replace('_', '-')}"
    if value is True or value is None:
        return [word]
    if value is False:
        return []
    if isinstance(value, list):
        return [word, *map(str, value)]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


def _number(said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"--models: {key} is a number that is not negative; got {value!r}")
    return value


def _count(said: Mapping[str, Any], key: str, default: int) -> int:
    if (value := _number(said, key, default)) != int(value):
        raise UserError(f"--models: {key} is a whole number; got {value!r}")
    return int(value)


def _refuse_unknown(said: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    if unknown := sorted(set(map(str, said)) - known):
        raise UserError(f"--models: {what} has {unknown[0]!r}, which is not known; known: {', '.join(sorted(known))}")
