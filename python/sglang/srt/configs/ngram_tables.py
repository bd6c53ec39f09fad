"""Reads the dtype of a checkpoint's n-gram tables, which its config.json may leave out. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.configs.checkpoint_header import stored_dtypes

KEY, LAYERS_KEY = "ple_embedding_dtype", "ple_layer_ids"
PIECES = ".ngram_embedding.shard_"
"""Part of the names of the tensors that a table is cut into."""
_NAMES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def with_table_dtype(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns config.json with the dtype of the n-gram tables in the checkpoint in `folder`, where it has tables and
    does not state it. Raises UserError for damaged files."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    if not text.get(LAYERS_KEY) or text.get(KEY) is not None:
        return dict(config)
    stored = stored_dtypes(folder, lambda name: PIECES in name) or {}
    dtypes = sorted({_NAMES.get(dtype, dtype) for name, dtype in stored.items() if not name.endswith("_scale")})
    if not dtypes:
        return dict(config)
    stated = {**text, KEY: dtypes[-1]}
    return {**config, "text_config": stated} if text is inner else stated
