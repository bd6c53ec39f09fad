"""Makes a model directory of a model in GGUF: its config, tokenizer and index as files, and links to its own files.

So everything that reads a model directory, in any process, reads models in GGUF. The directory is made once for a file
(its path, size and time) and kept in the cache.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.configs.cached_folder import cached_folder, make_folder
from sglang.srt.configs.gguf.families import Description, config_of
from sglang.srt.configs.gguf.files import GGUFModel, model_files, read_model
from sglang.srt.configs.gguf.tensors import INDEX_NAME, METHOD, WHY_UNREAD, Index, index_bytes, kept_modules, make_index
from sglang.srt.configs.gguf.tokenizer import (
    UnreadTokenizerError,
    Vocabulary,
    end_ids,
    tokenizer_config,
    tokenizer_json,
    vocabulary,
)

logger = logging.getLogger(__name__)

_SAMPLING = "general.sampling."
_NUMBERS = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
_FORMAT = 1
"""Number of the form of these directories: a change of what is in them needs another one."""


def unpack(path: Path) -> Path:
    """Returns the model directory of the GGUF model of which `path` is a file. Raises UserError for one that is damaged
    or not read, or if the cache cannot be written."""
    files = model_files(path)
    folder = cached_folder("gguf", files[0].stem, _FORMAT, files)
    if (folder / INDEX_NAME).is_file():
        return folder
    content = _content(read_model(files))
    make_folder(folder, INDEX_NAME, path, lambda partial: _write(partial, files, content))
    logger.info("Read the config and tokenizer of %s into %s", path, folder)
    return folder


def _content(model: GGUFModel) -> dict[str, bytes]:
    """Returns the files of the directory by name."""
    description = Description(model)
    config, architecture = config_of(description)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    index = make_index(model, architecture.targets, description.num_layers, heads, kv_heads)
    files: dict[str, Mapping[str, Any]] = {"generation_config.json": _sampling(description)}
    vocab = vocabulary(description.meta, config["vocab_size"])
    if vocab is not None:
        ends = end_ids(vocab)
        begin = vocab.token_id("bos_token_id")
        config |= {"eos_token_id": ends} if ends else {}
        config |= {} if begin is None else {"bos_token_id": begin}
        files |= _tokenizer_files(vocab)
    files["config.json"] = config | _quantization(index, config["model_type"])
    texts = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}
    return {**texts, INDEX_NAME: index_bytes(index)}


def _sampling(description: Description) -> dict[str, Any]:
    """Returns the parameters of sampling that the file recommends."""
    meta = description.meta
    values: dict[str, Any] = {key: meta.general_number(f"{_SAMPLING}{name}") for key, name in _NUMBERS.items()}
    if f"{_SAMPLING}top_k" in meta.values:
        values["top_k"] = meta.general(f"{_SAMPLING}top_k", int)
    return {key: value for key, value in values.items() if value is not None}


def _tokenizer_files(vocab: Vocabulary) -> dict[str, Mapping[str, Any]]:
    """Returns the tokenizer's files; in place of one that is not read, why: another one may be given."""
    config = tokenizer_config(vocab)
    try:
        return {"tokenizer.json": tokenizer_json(vocab), "tokenizer_config.json": config}
    except UnreadTokenizerError as error:
        return {"tokenizer_config.json": {**config, WHY_UNREAD: str(error)}}


def _quantization(index: Index, model_type: str) -> dict[str, Any]:
    """Returns the quantization config of the modules that stay in four bits, which `configs/quantization.py` reads."""
    kept = kept_modules(index)
    if not kept:
        return {}
    storage = (
        "mxfp4" if model_type == "gpt_oss" else "compressed-tensors"
    )  # the form of its experts, which are one tensor
    return {"quantization_config": {"quant_method": METHOD, "storage": storage, "modules": kept}}


def _write(folder: Path, files: Sequence[Path], content: Mapping[str, bytes]) -> None:
    for file in files:
        os.symlink(file.resolve(), folder / file.name)
    for name, data in content.items():
        (folder / name).write_bytes(data)
