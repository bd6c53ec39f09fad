"""Sampling parameters of one request, as they travel from the HTTP side to the scheduler."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.sampling.grammar_names import client_name
from sglang.srt.sampling.limits import (
    verify_grammar_source,
    verify_grammar_value,
    verify_stop_patterns,
    verify_stop_strings,
)

TOP_K_ALL = 1 << 30
"""`top_k` of a request that keeps the whole vocabulary."""
NO_TOKEN = -1
"""The token that sampling returns for a row that has none to choose: a logit is NaN, or none is above -inf."""
MAX_STOP_TOKEN_IDS = 65_536
MAX_SAMPLES = 128
MAX_COUNT = (1 << 31) - 1
"""Limit of token counts and of `top_k`: the largest signed 32-bit number."""
MAX_TEMPERATURE = 1e6
MAX_LOGIT_BIAS = 1e9
"""Logits plus this value, divided by the smallest temperature, are finite in float32."""
MAX_LOGIT_BIAS_KEY = 10
"""Digits of a token id."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. Field names and ranges are the public `/generate` interface.

    `sampling_seed` of None means that the scheduler draws one, `max_new_tokens` of None "until the context is full".
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1

    @property
    def has_penalties(self) -> bool:
        """Returns whether sampling depends on the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def num_bytes(self) -> int:
        """Returns about how many bytes a process needs for the client's texts in these parameters."""
        texts = (*self.stop, *self.stop_regex, *(getattr(self, name) or "" for name in _GRAMMARS))
        return sum(map(len, texts)) + ID_BYTES * len(self.stop_token_ids) + _BIAS_BYTES * len(self.logit_bias)

    def verify(self, vocab_size: int) -> None:
        """Raises ValueError for the first value that is out of range."""
        for name, low, high, low_open in _RANGES:
            value = getattr(self, name)
            inside = low < value <= high if low_open else low <= value <= high  # false for NaN, exact for any integer
            if not inside:
                raise ValueError(f"{name} must be {_interval(low, high, low_open)}, got {_shown(value)}.")
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_COUNT:
            raise ValueError(f"top_k must be -1 (all) or in [1, {MAX_COUNT}], got {_shown(self.top_k)}.")
        self._verify_lengths()
        self._verify_stops()
        self._drop_foreign_stop_ids(vocab_size)
        self._verify_bias(vocab_size)
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"only one of {', '.join(_GRAMMARS)} can be given, got {' and '.join(given)}.")
        for name in given:
            source = getattr(self, name)
            verify_grammar_source(client_name(name, source), source)

    def _verify_lengths(self) -> None:
        longest = MAX_COUNT
        if self.max_new_tokens is not None:
            if not 0 <= self.max_new_tokens <= longest:
                raise ValueError(f"max_new_tokens must be in [0, {longest}], got {_shown(self.max_new_tokens)}.")
            longest = self.max_new_tokens
        if not 0 <= self.min_new_tokens <= longest:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens={longest}], got {_shown(self.min_new_tokens)}."
            )
        seed = self.sampling_seed
        if seed is not None and not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"sampling_seed must be a 64-bit integer, got {_shown(seed)}.")

    def _verify_stops(self) -> None:
        verify_stop_strings(self.stop)
        verify_stop_patterns(self.stop_regex)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS}, got {len(self.stop_token_ids)}.")

    def _drop_foreign_stop_ids(self, vocab_size: int) -> None:
        """Drops ids that are not in the vocabulary: clients send those of other models, and they are never sampled."""
        self.stop_token_ids = [token for token in self.stop_token_ids if 0 <= token < vocab_size]

    def _verify_bias(self, vocab_size: int) -> None:
        for key, value in self.logit_bias.items():
            is_number = key.isascii() and key.isdigit() and len(key) <= MAX_LOGIT_BIAS_KEY
            if not (is_number and int(key) < vocab_size):
                raise ValueError(f"logit_bias keys must be token ids in [0, {vocab_size - 1}], got {_shown(key)}.")
            if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
                raise ValueError(
                    f"logit_bias values must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {value:g} for token "
                    f"{key}."
                )


_RANGES: tuple[tuple[str, float, float, bool], ...] = (  # name, low, high, whether low itself is excluded
    ("temperature", 0, MAX_TEMPERATURE, False),
    ("top_p", 0, 1, True),
    ("min_p", 0, 1, False),
    ("frequency_penalty", -2, 2, False),
    ("presence_penalty", -2, 2, False),
    ("repetition_penalty", 0, 2, True),
    ("n", 1, MAX_SAMPLES, False),
)
ID_BYTES, _BIAS_BYTES = 40, 200
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_LISTS = ("stop", "stop_regex")
_NULLABLE = ("max_new_tokens",)
_SHOWN_BITS = 128
_SHOWN_CHARS = 100
_ABRIDGED = reprlib.Repr()
_ABRIDGED.maxstring = _SHOWN_CHARS
_TYPE_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?", re.DOTALL)


def _interval(low: float, high: float, low_open: bool) -> str:
    return f"in {'(' if low_open else '['}{low}, {high:g}]"


def _shown(value: Any) -> str:
    """Returns a client's value for an error message, shortened if it is long."""
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _SHOWN_BITS else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"{value:g}"
    return _ABRIDGED.repr(value)


def merge(
    request: Mapping[str, Any],
    model_defaults: Mapping[str, Any] | None = None,
    server_defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Returns the parameters of one request: its own values, then the server's, then the model's, then the defaults
    above.

    A value of None counts as not given, except for `max_new_tokens`, where it means "until the context is full". Raises
    ValueError for an unknown key or a value of the wrong type; ranges are checked by `verify`.
    """
    if model_defaults and model_defaults.get("top_k") == 0:  # generation_config.json's way to say "all"
        model_defaults = {**model_defaults, "top_k": -1}
    values: dict[str, Any] = {}
    for source in (model_defaults or {}, server_defaults or {}, request):
        values.update({key: value for key, value in source.items() if value is not None or key in _NULLABLE})
    for key in values:
        if key not in SamplingParams.__struct_fields__:
            close = difflib.get_close_matches(key[:_SHOWN_CHARS], SamplingParams.__struct_fields__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown sampling parameter {_shown(key)}{hint}")
    try:
        return msgspec.convert(_normalize(values), SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(_type_message(error, values)) from None


def _normalize(values: dict[str, Any]) -> dict[str, Any]:
    """Converts accepted spellings: one stop string to a list, a grammar object to text, token ids to numbers. Raises
    ValueError for a grammar that is too large to become text."""
    for name in _LISTS:
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
        if isinstance(values.get(name), list):
            values[name] = [text for text in values[name] if text != ""]
    for name in _GRAMMARS:
        if name in values:
            values[name] = grammar_text(name, values[name])
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {str(key): value for key, value in values["logit_bias"].items()}
    return values


def grammar_text(name: str, value: Any) -> Any:
    """Returns a grammar that was given as an object, a schema or a structural tag, as text; other values unchanged.
    Raises ValueError for one that is too large."""
    if not isinstance(value, dict | bool) or name not in ("json_schema", "structural_tag"):
        return value
    verify_grammar_value(name, value)
    return json.dumps(value)


def _type_message(error: msgspec.ValidationError, values: dict[str, Any]) -> str:
    match = _TYPE_ERROR.fullmatch(str(error))
    if match is None or not match["where"]:
        return str(error)
    name = re.split(r"[.\[]", match["where"])[0]
    return f"{name}: {match['what'].replace('`', '').lower()} in {_shown(values.get(name))}."
