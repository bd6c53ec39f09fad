"""Reads a checkpoint's JSON files, and typed values from them; errors name the key and the file."""

from __future__ import annotations

import json
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
"""Largest values that a config.json may have: several times those of any published model, but small enough that such a
model is described, and refused for its size, quickly. Other whole numbers may be up to LARGEST_OTHER."""
LARGEST_OTHER = 1 << 24


def bounded(key: str, value: int, source: str) -> int:
    """Returns `value`, the whole number at `key`. Raises UserError if it is negative or larger than any model has."""
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
        if kind is float and isinstance(value, int) and not is_bool_as_number:
            return float(value)  # type: ignore[return-value]
        if is_bool_as_number or not isinstance(value, kind):
            raise UserError(f"{self.source}: {key!r} must be of type {kind.__name__}; got {value!r}.")
        return value


def merge_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with `overrides` merged into it; nested objects merge key by key."""
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
"""Values by the inner model_type that published multimodal configs leave out, because they are the defaults of the
class that wrote them."""


_OF_THE_WHOLE = ("architectures", "tie_word_embeddings")  # the output head is outside of the text part


STORED_VOCABULARY = "stored_vocab_size"
"""Key, not part of published configs, for the rows of a padded embedding; `vocab_size` then leaves the padding out."""


def _without_padding(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with a vocab_size without padding, where the config states the unpadded size."""
    stored, real = config.get("vocab_size"), config.get("unpadded_vocab_size")
    if type(stored) is int and type(real) is int and 0 < real < stored:
        return {**config, "vocab_size": real, STORED_VOCABULARY: stored}
    return config


def select_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's part of a multimodal config, with outer keys that it lacks; else `config`. The inner
    value wins where both have a key, except for keys of the whole model."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return rotary_by_type(_without_padding(dict(config)))
    outer = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "audio_config")}
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    defaults = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
    return rotary_by_type(_without_padding(outer | {**defaults, **inner} | whole))
