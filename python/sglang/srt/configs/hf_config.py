"""Reads a checkpoint's JSON files, and typed values from them; errors name the key and the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.configs.layer_lists import rotary_by_type
from sglang.srt.errors import UserError

T = TypeVar("T")

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "v_head_dim": 4096,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 20,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}
"""Largest values that a config.json may have, by key: several times those of any published model. The start-up can
describe a model within these limits quickly, and then refuse it for its size; beyond them it would be busy for long."""
LARGEST_OTHER = 1 << 24
"""Largest value of whole numbers whose key is not in LARGEST."""


def bounded(key: str, value: int, source: str) -> int:
    """Returns `value`, the whole number at `key`. Raises UserError if it is negative or above its limit."""
    limit = LARGEST.get(key, LARGEST_OTHER)
    if not 0 <= value <= limit:
        raise UserError(f"{source}: {key!r} must be between 0 and {limit:,}; got {value}.")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in `path`. Raises UserError if it is unreadable, malformed or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the directory's config.json. Raises UserError if there is none, or it is malformed."""
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} has no config.json; it does not look like a Hugging Face model directory.")
    return read_json_object(path)


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Reads generation_config.json, or returns {} if the model has none."""
    path = directory / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


class ConfigReader:
    """A typed reader of a config mapping; `source` names it in messages."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def require(self, key: str, kind: type[T]) -> T:
        """Returns the value of `key`, of type `kind`. Raises UserError if it is missing or of another type."""
        if self.values.get(key) is None:
            raise UserError(f"{self.source}: the key {key!r} is missing.")
        return self._typed(key, self.values[key], kind)

    def default(self, key: str, kind: type[T], default: T) -> T:
        """Returns the value as `require` does, or `default` if the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else self._typed(key, value, kind)

    def positive(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1; without `default` the key is required. Raises UserError."""
        value = self.require(key, int) if default is None else self.default(key, int, default)
        if value < 1:
            raise UserError(f"{self.source}: {key!r} must be at least 1; got {value}.")
        return bounded(key, value, self.source)

    def count(self, *keys: str) -> int:
        """Returns the whole number at the first of `keys` that is present; 0 if none is. Raises UserError."""
        present = (key for key in keys if self.values.get(key) is not None)
        key = next(present, None)
        return 0 if key is None else bounded(key, self.require(key, int), self.source)

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        is_bool_as_number = isinstance(value, bool) and kind is not bool
        if kind is float and isinstance(value, int) and abs(value) <= sys.float_info.max and not is_bool_as_number:
            return float(value)  # type: ignore[return-value]
        if is_bool_as_number or not isinstance(value, kind) or value != value:  # a NaN
            raise UserError(f"{self.source}: {key!r} must be of type {kind.__name__}; got {value!r}.")
        return value


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `config` with `overrides` merged into it; nested objects are merged key by key."""
    result = dict(config)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merge_overrides(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }
}
"""For each `model_type` of a `text_config`, the values of keys that published configs may leave out: transformers does
not write values that are the defaults of its config class."""


_WHOLE_MODEL_KEYS = ("architectures", "tie_word_embeddings")
"""Keys whose value outside of `text_config` wins. `tie_word_embeddings` is one, as the output head is outside too."""


STORED_VOCABULARY = "stored_vocab_size"
"""Key that this module adds for a padded embedding: the rows that are stored, padding included. `vocab_size` is then
the number without padding. Published configs do not have this key."""


def _without_padding(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with its `unpadded_vocab_size`, if it has one, as `vocab_size`, and the padded size as
    STORED_VOCABULARY."""
    stored, real = config.get("vocab_size"), config.get("unpadded_vocab_size")
    if type(stored) is int and type(real) is int and 0 < real < stored:
        return {**config, "vocab_size": real, STORED_VOCABULARY: stored}
    return config


def select_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the language model. For a multimodal config that is its `text_config`, with the outer keys
    that it lacks; where both have a key the inner value wins, except for _WHOLE_MODEL_KEYS. In any config, padding of
    the vocabulary and lists of rotary parameters are converted (`_without_padding`, `rotary_by_type`)."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return rotary_by_type(_without_padding(dict(config)))
    outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "audio_config")}
    whole = {key: config[key] for key in _WHOLE_MODEL_KEYS if config.get(key) is not None}
    defaults = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
    return rotary_by_type(_without_padding(outer | {**defaults, **inner} | whole))
