"""Reads adapter_config.json: what an adapter asks for, and why it is refused if that is not computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import regex

from sglang.srt.configs.hf_config import ConfigReader, read_json_object
from sglang.srt.errors import UserError

Pattern: TypeAlias = "regex.Pattern[str]"
CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 512
"""Largest rank of a module that an adapter, or --max-lora-rank, may have."""
_IGNORED = frozenset({
    "alora_invocation_string", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
})  # fmt: skip
"""Keys that change nothing about A and B as they are stored: how they were trained, and which modules were left out.
`fan_in_fan_out` describes how the base model's own weights lie."""
_READ = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "bias",
    "target_parameters", "ensure_weight_tying", "use_dora",
})  # fmt: skip
_REFUSED: Mapping[str, str] = {
    "modules_to_save": "whole modules are not replaced; merge the adapter into the model",
    "trainable_token_indices": "trained rows of the embedding are not added; merge the adapter into the model",
    "lora_bias": "biases of B are not added",
    "layer_replication": "layers are not repeated",
    "alora_invocation_tokens": "an adapter applies to all tokens of a request, not to those behind an invocation",
    "use_qalora": "A of QALoRA reads pooled inputs, which are not computed",
    "use_bdlora": "block-diagonal A and B are not computed",
    "lora_ga_config": "the base weights were changed with it; save the adapter as a plain one",
}
_PLAIN_INITS = frozenset({"default", "gaussian", "orthogonal", "eva"})
"""Values of `init_lora_weights` that leave the base model as it was."""
PATTERN_SECONDS = 0.1
"""The longest that a pattern of an adapter may take to match one name: it is a program that strangers write."""
MAX_PATTERN = 1024
EMBEDDINGS, HEADS = ("embed_tokens", "embeddings"), ("lm_head", "unembed_tokens")
"""Last names of the embedding, and of the output head, in adapters."""
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says of ranks and factors. `targets`: the modules by their last names, or None where a
    pattern or `all-linear` chose them: PEFT writes tensors of these modules alone."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | None
    rank_pattern: tuple[tuple[Pattern, int], ...] = ()
    alpha_pattern: tuple[tuple[Pattern, float], ...] = ()
    layers: frozenset[int] | None = None
    excluded: tuple[str, ...] | None = ()
    """The modules of `exclude_modules`; None: a pattern chose them."""
    parameters: tuple[str, ...] = ()
    """Parameters that have A and B of their own, by the ends of their names: all experts of a layer in one tensor."""
    tied: bool = False
    """True: an output head that is tied to the embedding has the embedding's A and B transposed, though it is none of
    the targets."""
    dora: bool = False
    """True: rows of W + B A are scaled to lengths that the adapter has (DoRA)."""

    @property
    def largest_rank(self) -> int:
        """Returns the largest rank of a module."""
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by its name in the adapter."""
        return next((rank for pattern, rank in self.rank_pattern if _matches(pattern, module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Returns the factor of B A of a module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if _matches(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def expects(self, module: str) -> bool:
        """Returns whether the adapter may have A and B of a module."""
        targets = self.targets
        if self.tied and targets is not None and any(_ends(end, name) for end in EMBEDDINGS for name in targets):
            targets = (*targets, *HEADS)
        if targets is not None and not any(_ends(name, module) for name in targets):
            return False
        return self.in_layers(module)

    def in_layers(self, module: str) -> bool:
        """Returns whether the module is in one of the adapter's layers."""
        number = _LAYER.search(module)
        return self.layers is None or (number is not None and int(number[1]) in self.layers)

    def names(self, module: str) -> bool:
        """Returns whether the adapter must have A and B of a module, if the model has it: lists name it."""
        if self.targets is None or self.excluded is None or any(_ends(name, module) for name in self.excluded):
            return False
        return self.expects(module)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the adapter_config.json of a folder. Raises UserError for what is malformed or not computed here."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}; it does not look like a LoRA adapter of PEFT.")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(f"{path} has more than {MAX_CONFIG_BYTES >> 20} MiB.")
    return adapter_config(read_json_object(path), str(path))


def adapter_config(values: Mapping[str, Any], source: str) -> AdapterConfig:
    """Returns the config that a JSON object holds. Raises UserError as `read_adapter_config` does."""
    _refuse(values, source)
    config = ConfigReader(values, source)
    alpha = config.default("lora_alpha", float, 8.0)
    if not math.isfinite(alpha):
        raise UserError(f"{source}: 'lora_alpha' must be a finite number.")
    return AdapterConfig(
        rank=_rank("r", config.default("r", int, 8), source),
        alpha=alpha,
        rslora=config.default("use_rslora", bool, False),
        targets=_targets(values.get("target_modules"), "target_modules", source),
        rank_pattern=tuple((each, _rank(key, v, source)) for key, each, v in _patterns(values, "rank_pattern", source)),
        alpha_pattern=tuple(
            (each, _alpha(key, v, source)) for key, each, v in _patterns(values, "alpha_pattern", source)
        ),
        layers=_layers(values.get("layers_to_transform"), source),
        excluded=_targets(values.get("exclude_modules") or [], "exclude_modules", source),
        parameters=_parameters(values.get("target_parameters"), source),
        tied=config.default("ensure_weight_tying", bool, False),
        dora=config.default("use_dora", bool, False),
    )


def _refuse(values: Mapping[str, Any], source: str) -> None:
    """Raises UserError for the first key that asks for what is not computed here."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{source}: peft_type {kind!r} is not supported; LORA is.")
    bias = values.get("bias", "none")
    if bias != "none":
        raise UserError(f"{source}: bias {bias!r} is not supported: trained biases are not added; 'none' is.")
    init = values.get("init_lora_weights", True)
    if not isinstance(init, bool) and init is not None and not (isinstance(init, str) and init in _PLAIN_INITS):
        raise UserError(
            f"{source}: init_lora_weights {init!r} is not supported: the base model's weights were changed with it."
            " Save the adapter with path_initial_model_for_weight_conversion."
        )
    for key, value in values.items():
        if value and key in _REFUSED:
            raise UserError(f"{source}: {key} is not supported: {_REFUSED[key]}.")
        if value and key not in _READ and key not in _IGNORED and key not in _REFUSED:
            raise UserError(f"{source}: the key {key!r} is not known here, and may change what the adapter does.")


def _rank(key: str, value: Any, source: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise UserError(f"{source}: the rank {key!r} must be a whole number of 1 to {MAX_RANK}; got {value!r}.")
    return value


def _alpha(key: str, value: Any, source: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{source}: the alpha of {key!r} must be a finite number; got {value!r}.")
    return float(value)


def _targets(value: Any, key: str, source: str) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise UserError(f"{source}: {key!r} must be a string or a list of names.")
    return tuple(value)


def _parameters(value: Any, source: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise UserError(f"{source}: 'target_parameters' must be a list of names.")
    return tuple(value)


def _layers(value: Any, source: str) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = [value] if type(value) is int else value
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise UserError(f"{source}: 'layers_to_transform' must be a layer's number or a list of them.")
    return frozenset(numbers)


def _patterns(values: Mapping[str, Any], key: str, source: str) -> Iterator[tuple[str, Pattern, Any]]:
    """Yields each pattern as it is written and as it is compared, with its value. As PEFT does it, a pattern matches
    the whole name of a module, or all behind a dot."""
    patterns = values.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise UserError(f"{source}: {key!r} must be an object.")
    for written, value in patterns.items():
        try:
            if len(written) > MAX_PATTERN:
                raise ValueError(f"it has more than {MAX_PATTERN} characters")
            yield written, regex.compile(rf"(?:.*\.)?(?:{written})$"), value
        except (regex.error, ValueError, RecursionError) as error:
            raise UserError(f"{source}: {key} has {written[:256]!r}, which is no pattern: {error}.") from None


def _matches(pattern: Pattern, module: str) -> bool:
    try:
        return pattern.match(module, timeout=PATTERN_SECONDS) is not None
    except TimeoutError:
        raise UserError(f"{CONFIG_NAME}: the pattern {pattern.pattern[:256]!r} takes too long to match.") from None


def _ends(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")
