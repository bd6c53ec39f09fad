"""What is read from a config, as text: each value of the model's description that differs from its default, once for
all layers that are alike. Weights, caches and kernels, which follow from it, are in `descriptions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.plan.media import describe_media
from sglang.srt.plan.model_description import describe_model
from sglang.srt.server_args import ServerArgs
from srt.plan.descriptions import ranges, reason

ELSEWHERE = frozenset({"layers", "names", "quantization"})
"""Fields of the model that are shown by layer, or in `descriptions`."""


def read(folder: Path) -> str:
    """Returns the text for the model in `folder`, or why it is refused."""
    try:
        config = ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=str(folder), load_format="dummy"))
        model = describe_model(config.hf_config, config.quantization, "", "config.json", config.text_keys)
        media = describe_media(config.media_config)
    except UserError as error:
        return f"refused: {reason(error, folder)}\n"
    lines = list(_fields(model, ELSEWHERE))
    lines += [] if media is None else list(_lines("media", media))
    alike: dict[str, list[int]] = {}
    for number, layer in enumerate(model.layers):
        alike.setdefault("\n".join(_fields(layer)), []).append(number)
    for text, numbers in alike.items():
        lines += ["", f"layers {ranges(numbers)}", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def _fields(value: Any, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the fields of a dataclass that differ from their defaults."""
    for field in dataclasses.fields(value):
        if field.name in left_out or not field.repr:
            continue
        own = getattr(value, field.name)
        if own == (field.default_factory() if callable(field.default_factory) else field.default):
            continue
        yield from _lines(field.name, own)


def _lines(name: str, value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{name}: {type(value).__name__}"
        yield from (f"  {line}" for line in _fields(value))
    elif isinstance(value, tuple | list) and any(dataclasses.is_dataclass(each) for each in value):
        for number, each in enumerate(value):
            yield from _lines(f"{name}[{number}]", each)
    elif isinstance(value, Enum):
        yield f"{name}: {value.name}"
    elif isinstance(value, frozenset | set):
        yield f"{name}: {sorted(value)}"
    else:
        yield f"{name}: {value!r}" if not callable(value) else f"{name}: {value.__name__}"
