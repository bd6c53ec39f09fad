"""Makes a model directory of a checkpoint that is a container of tensors with compressed block scales (CSF).

A container has `build-contract.json` with its schema and the names of all tensors, the tensors in `tensors/` without an
index, and in `metadata/` what a model directory has besides. What such tensors hold is in
`model_loader/compressed_scales.py`. The directory has an index of the tensors, and links to them and to the metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.configs.cached_folder import cached_folder, make_folder
from sglang.srt.configs.checkpoint_header import INDEX_NAME, expanded_name, file_tensors
from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.errors import UserError

CONTRACT, METADATA, TENSORS = "build-contract.json", "metadata", "tensors"
SCHEMAS = ("lil-nvfp4-csf-checkpoint/1", "lil-mxfp4-csf-checkpoint/1")
METHODS = ("nvfp4_csf", "mxfp4_csf")
_VERSION = 1
_FORMAT = 1
"""Number of the form of the directories that are made: a change of what is in them needs another one."""


def container_of(folder: Path) -> Path | None:
    """Returns the container that `folder` is, or whose metadata it has; None: it is something else."""
    if (folder / CONTRACT).is_file():
        return folder
    return folder.parent if folder.name == METADATA and (folder.parent / CONTRACT).is_file() else None


def unpack_container(root: Path) -> Path:
    """Returns the model directory of a container. Raises UserError for one that is damaged or of another version."""
    contract, config = root / CONTRACT, root / METADATA / "config.json"
    stored = sorted((root / TENSORS).glob("*.safetensors"))
    folder = cached_folder("csf", root.name, _FORMAT, (contract, config, *stored))
    if (folder / INDEX_NAME).is_file():
        return folder
    sources = _source_names(contract)
    written = json.dumps(_with_source_quantization(config))
    weight_map: dict[str, str] = {}
    for path in stored:
        for name in file_tensors(path):
            if name in weight_map:
                raise UserError(f"{path} has the tensor {name}, which {weight_map[name]} has too.")
            weight_map[name] = f"{TENSORS}/{path.name}"
    missing = sources - {expanded_name(name) for name in weight_map}
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        raise UserError(
            f"{root} lacks {len(missing)} tensors that {CONTRACT} names: {shown}. Is the download complete?"
        )

    def write(partial: Path) -> None:
        os.symlink((root / TENSORS).resolve(), partial / TENSORS)
        for path in (root / METADATA).iterdir():
            if path.name not in (config.name, INDEX_NAME):
                os.symlink(path.resolve(), partial / path.name)
        (partial / "config.json").write_text(written)
        (partial / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))

    make_folder(folder, INDEX_NAME, root, write)
    return folder


def _source_names(contract: Path) -> set[str]:
    """Returns the names of all tensors, those of compressed scales as they were before."""
    content = read_json_object(contract)
    if content.get("schema") not in SCHEMAS:
        raise UserError(f"{contract}: schema {content.get('schema')!r} is not read (has {', '.join(SCHEMAS)}).")
    names = content.get("source_names")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{contract}: source_names has to be an object with the names of all tensors.")
    return set(names)


def _with_source_quantization(path: Path) -> Mapping[str, Any]:
    """Returns the config with the quantization that the checkpoint had before its scales were compressed."""
    config = dict(read_json_object(path))
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") not in METHODS:
        return config
    if stated.get("format_version") != _VERSION:
        raise UserError(f"{path}: format_version {stated.get('format_version')!r} is not read (has {_VERSION}).")
    source = stated.get("source_quantization_config")
    del config["quantization_config"]
    return config | ({} if source is None else {"quantization_config": source})
