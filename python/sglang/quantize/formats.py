"""Published form of each scheme: the tensors of one weight, and the entries of the configuration.

Sources: DeepSeek-V3's fp8 checkpoints, compressed-tensors (config_groups, pack-quantized and its kin), ModelOpt's
hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.layers.quantization.reference import E2M1_MAX, E4M3_MAX, Quantized

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A published format. `tensors(quantized, (N, K))` returns the named tensors of one module; `config(ignored module
    names)` the quantization_config, or with `modelopt` the content of hf_quant_config.json. `static_input`: each module
    also has a tensor input_scale for its activations."""

    scheme: Scheme
    tensors: Callable[[Quantized, tuple[int, int]], Tensors]
    config: Callable[[list[str]], Config]
    modelopt: bool = False
    static_input: bool = False

    @property
    def largest_input(self) -> float:
        """Returns the largest |x| that is representable with an input_scale of 1."""
        return E4M3_MAX * (E2M1_MAX if self.scheme.element == "e2m1" else 1.0)


def _fp8_tensors(q: Quantized, shape: tuple[int, int]) -> Tensors:
    leaf = "weight_scale" if q.scale.ndim == 0 else "weight_scale_inv"
    return {"weight": q.data, leaf: q.scale}


def _fp8_config(
    block: list[int] | None, method: str = "fp8", activations: str = "dynamic"
) -> Callable[[list[str]], Config]:
    def config(ignored: list[str]) -> Config:
        entry: Config = {"quant_method": method, "fmt": "e4m3", "activation_scheme": activations}
        if block is not None:
            entry["weight_block_size"] = block
        return entry | {"modules_to_not_convert": ignored}

    return config


def _channel_tensors(q: Quantized, shape: tuple[int, int]) -> Tensors:
    return {"weight": q.data, "weight_scale": q.scale[:, None]}


def _packed_int4_tensors(q: Quantized, shape: tuple[int, int]) -> Tensors:
    """Packs eight values into an int32, the first in the lowest bits: our bytes, read four at a time."""
    return {
        "weight_packed": q.data.view(torch.int32),
        "weight_scale": q.scale,
        "weight_shape": torch.tensor(shape, dtype=torch.int64),
    }


def _packed_mxfp4_tensors(q: Quantized, shape: tuple[int, int]) -> Tensors:
    return {"weight_packed": q.data, "weight_scale": q.scale}


def _nvfp4_tensors(q: Quantized, shape: tuple[int, int]) -> Tensors:
    assert q.global_scale is not None
    return {"weight": q.data, "weight_scale": q.scale, "weight_scale_2": q.global_scale}


def _compressed_tensors(form: str, weights: Config, activations: Config | None) -> Callable[[list[str]], Config]:
    def config(ignored: list[str]) -> Config:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    return config


def _numbers(bits: int, kind: str, strategy: str, group_size: int | None = None, dynamic: bool = False) -> Config:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": group_size,
        "symmetric": True,
        "dynamic": dynamic,
    }


def _nvfp4_config(ignored: list[str]) -> Config:
    return {
        "producer": {"name": "sm120-sglang"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ignored,
        },
    }


def with_cache(stated: Config, by_head: bool) -> Config:
    """Returns a format's configuration with an FP8 cache that has scales, where its readers look for one."""
    if "quantization" in stated:
        return stated | {"quantization": stated["quantization"] | {"kv_cache_quant_algo": "FP8"}}
    if stated["quant_method"] == "compressed-tensors":
        return stated | {"kv_cache_scheme": _numbers(8, "float", "attn_head" if by_head else "tensor")}
    return stated | {"kv_cache_scheme": "static"}


def _per_token(bits: int, kind: str) -> Config:
    return _numbers(bits, kind, "token", dynamic=True)


def _int4(group_size: int) -> Format:
    config = _compressed_tensors("pack-quantized", _numbers(4, "int", "group", group_size), None)
    return Format(SCHEMES[f"int4_g{group_size}"], _packed_int4_tensors, config)


_FORMATS = (
    Format(SCHEMES["fp8_tensor"], _fp8_tensors, _fp8_config(None)),
    Format(SCHEMES["fp8_block"], _fp8_tensors, _fp8_config([128, 128])),
    Format(SCHEMES["mxfp8"], _fp8_tensors, _fp8_config([1, 32], "mxfp8")),
    Format(
        SCHEMES["fp8_channel"],
        _channel_tensors,
        _compressed_tensors("float-quantized", _numbers(8, "float", "channel"), _per_token(8, "float")),
    ),
    Format(
        SCHEMES["int8_channel"],
        _channel_tensors,
        _compressed_tensors("int-quantized", _numbers(8, "int", "channel"), _per_token(8, "int")),
    ),
    _int4(32),
    _int4(64),
    _int4(128),
    Format(
        SCHEMES["mxfp4"],
        _packed_mxfp4_tensors,
        _compressed_tensors(
            "mxfp4-pack-quantized", _numbers(4, "float", "group", 32) | {"scale_dtype": "torch.uint8"}, None
        ),
    ),
    Format(SCHEMES["nvfp4"], _nvfp4_tensors, _nvfp4_config, modelopt=True, static_input=True),
)
FORMATS = {form.scheme.name: form for form in _FORMATS}
STATIC_FORMATS = {
    "fp8_tensor": Format(
        SCHEMES["fp8_tensor"], _fp8_tensors, _fp8_config(None, activations="static"), static_input=True
    )
}
"""Variants of formats that otherwise leave the scale of activations to the server."""
