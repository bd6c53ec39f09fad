"""Scales of the KV cache in a file (--quantization-param-path). No torch.

    {"model_type": "llama",
     "kv_cache": {"dtype": "float8_e4m3fn",
                  "scaling_factor": {"0": {"0": 0.0231, "1": 0.0195}},
                  "k_scale": {"0": 0.0231, "1": [0.0195, 0.0119]},
                  "v_scale": {"0": 0.0042, "1": 0.0038}}}

`scaling_factor` is the form that SGLang and older vLLM read: by rank and by layer, one number for keys and values. Here
the ranks of a server share the largest of their scales, so that a file serves any number of them. `k_scale` and
`v_scale` are ours: by layer, a number or one for each KV head, of which the largest counts. Where they are given, they
count before the others. Keys and values are divided by a scale when they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.hf_config import read_json_object
from sglang.srt.environ import warn_once
from sglang.srt.errors import UserError
from sglang.srt.plan.kv_spec import FP4_KV, has_tensor_scales
from sglang.srt.plan.model_description import ModelDescription

FLAG = "--quantization-param-path"
DTYPES = ("float8_e4m3fn", "fp8_e4m3")
CALIBRATE = "python -m sglang.quantize --kv-cache-scales FILE --calibrate TEXT writes one; or start without the flag."
HEAD_RATIO = 1024.0
"""How much larger than its own a head's scale may be: it then costs at most 0.22% of the head's largest number, by
which 16 bits round it."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Of a scale: beyond these it, or what it divides, is 0 or infinite in fp32."""
_E2M1_MAX = 6.0
_MOST_DIGITS = 9
"""Of a layer's or a rank's number."""


@dataclass(frozen=True, slots=True)
class LayerScales:
    """What a layer's keys and values are divided by."""

    k: float
    v: float


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The scales of a file, by layer."""

    source: Path
    layers: Mapping[int, LayerScales]

    def __str__(self) -> str:
        return f"of {len(self.layers)} layers, from {self.source}"


def scale_factor(stated: str | None, dtype: str) -> float:
    """Returns what a checkpoint's scales, made for a cache of the dtype `stated`, are multiplied by for one of `dtype`.
    Those for e2m1 make the largest number 6 * 448, which e4m3 does not reach."""
    return _E2M1_MAX if stated == FP4_KV and dtype == "fp8_e4m3" else 1.0


def is_scale(value: float) -> bool:
    """Returns whether a number can be a scale."""
    return SMALLEST <= value <= LARGEST


def plan_cache_scales(
    path: str | None, model_types: Collection[str], model: ModelDescription, kv_dtype: str
) -> tuple[CacheScales | None, tuple[str, ...]]:
    """Reads the file at `path`, and checks it against the model. Returns the scales, None where no layer takes any, and
    notes about that. Raises UserError that says what to do."""
    if path is None:
        return None, ()
    scales = read_cache_scales(path, model_types)
    layers = scaled_layers(model)
    if not has_tensor_scales(kv_dtype):
        return None, (f"{FLAG} has no effect: the KV cache is in {kv_dtype}; add --kv-cache-dtype fp8_e4m3",)
    if not layers:
        return None, (f"{FLAG} has no effect: what the layers of this model cache brings scales of its own",)
    if strangers := sorted(number for number in scales.layers if number >= len(model.layers)):
        raise UserError(
            f"{FLAG} {path} has scales of layer {_listed(strangers)}, and {model.title} has {len(model.layers)} layers:"
            f" it was written for another model. {CALIBRATE}"
        )
    if missing := sorted(set(layers) - scales.layers.keys()):
        raise UserError(f"{FLAG} {path} has no scale of layer {_listed(missing)}. {CALIBRATE}")
    return CacheScales(scales.source, {number: scales.layers[number] for number in layers}), ()


def scaled_layers(model: ModelDescription) -> list[int]:
    """Returns the layers that take scales."""
    return [number for number, layer in enumerate(model.layers) if layer.mixer.cache_scale_bytes]


def read_cache_scales(path: str, model_types: Collection[str]) -> CacheScales:
    """Reads the file. `model_types`: those that it may be for; empty: any. Raises UserError for anything but positive
    numbers."""
    content = read_json_object(Path(path))
    where = f"{FLAG} {path}"
    stated = content.get("model_type")
    if not isinstance(stated, str | None):
        raise UserError(f"{where}: 'model_type' must be a text; got {_shown(stated)}.")
    if stated is not None and model_types and stated not in model_types:
        raise UserError(f"{where} is for {stated!r}, and the model is {' or '.join(sorted(model_types))}. {CALIBRATE}")
    cache = content.get("kv_cache")
    if not isinstance(cache, Mapping):
        raise UserError(f"{where}: 'kv_cache' must be an object; got {cache!r}. {CALIBRATE}")
    if cache.get("dtype") not in DTYPES:
        raise UserError(f"{where}: kv_cache 'dtype' must be {DTYPES[0]}; got {cache.get('dtype')!r}.")
    both = _of_ranks(cache.get("scaling_factor"), f"{where}: kv_cache 'scaling_factor'")
    k, v = (_of_layers(cache.get(name), f"{where}: kv_cache {name!r}") for name in ("k_scale", "v_scale"))
    layers = both.keys() | k.keys() | v.keys()
    if not layers:
        raise UserError(f"{where} has no scales: kv_cache 'scaling_factor' is empty. {CALIBRATE}")
    for name, part in (("k_scale", k), ("v_scale", v)):
        if without := sorted(layers - part.keys() - both.keys()):
            raise UserError(f"{where}: kv_cache {name!r} lacks layer {_listed(without)}. {CALIBRATE}")
    return CacheScales(Path(path), {n: LayerScales(k.get(n) or both[n], v.get(n) or both[n]) for n in sorted(layers)})


def _of_ranks(value: Any, where: str) -> dict[int, float]:
    """Returns the largest scale of each layer over the ranks."""
    ranks = [_of_layers(layers, f"{where} of rank {rank}") for rank, layers in _entries(value, where)]
    if any(scales.keys() != ranks[0].keys() for scales in ranks):
        raise UserError(f"{where} does not have the same layers for each rank. {CALIBRATE}")
    return {} if not ranks else {layer: max(scales[layer] for scales in ranks) for layer in ranks[0]}


def _of_layers(value: Any, where: str) -> dict[int, float]:
    """Returns each layer's scale, the largest of its heads' if it has several."""
    scales = {}
    for layer, given in _entries(value, where):
        heads = given if isinstance(given, list) else [given]
        numbers = list(_positive(heads, f"{where} of layer {layer}"))
        if not numbers:
            raise UserError(f"{where} of layer {layer} is empty. {CALIBRATE}")
        scales[layer] = max(numbers)
        if max(numbers) > HEAD_RATIO * min(numbers):
            warn_once(
                f"{where} of layer {layer} differs {max(numbers) / min(numbers):.3g} times between heads: all take the"
                " largest, and the smallest numbers of some heads lose digits"
            )
    return scales


def _entries(value: Any, where: str) -> Iterator[tuple[int, Any]]:
    """Yields the items of an object with whole numbers as keys."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise UserError(f"{where} must be an object; got {value!r}.")
    for key, item in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
            raise UserError(f"{where} must have whole numbers as keys; got {_shown(key)}.")
        yield int(key), item


def _positive(numbers: Iterable[Any], where: str) -> Iterator[float]:
    for number in numbers:
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not 0.0 < number < math.inf:
            raise UserError(f"{where} must be a positive number; got {_shown(number)}. {CALIBRATE}")
        if not is_scale(number):
            raise UserError(f"{where} must be from {SMALLEST:g} to {LARGEST:g}; got {_shown(number)}. {CALIBRATE}")
        yield float(number)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} others"
