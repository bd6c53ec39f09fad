"""Decides whether a model is served with images, and collects what the front needs for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import merge_overrides, read_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.front.media.media_tokens import MediaTokens, media_tokens
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.pictures.processor_files import ProcessorFiles, read_processor_files


@dataclass(frozen=True, slots=True)
class ServedMedia:
    """Media settings of a model that is served with images."""

    tokens: MediaTokens
    files: ProcessorFiles
    pixel_dtype: str
    """Type in which the encoder takes patches."""


def served_media(
    args: ServerArgs, model: ModelConfig, pixel_dtype: str = "float32", by_class: bool = False
) -> ServedMedia | None:
    """Returns None for a model without a vision tower, and with --language-model-only. pixel_dtype: the type in which
    the encoder takes patches. by_class: a class of transformers computes the model. Raises UserError if the processor's
    files cannot be read."""
    if args.language_model_only or args.skip_tokenizer_init or args.is_embedding:
        return None
    directory = Path(model.model_path)
    config: Mapping[str, Any] = merge_overrides(read_config(directory), args.model_overrides())
    tokens = media_tokens(config, by_class)
    if tokens is None:
        return None
    files = read_processor_files(directory, tokens.family, args.mm_process_config, config)
    return ServedMedia(tokens, files, pixel_dtype)
