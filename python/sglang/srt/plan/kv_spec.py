"""The dtypes of caches."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.errors import UserError

KV_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
FP8_KV = "fp8_e4m3"
FP4_KV = "fp4_e2m1"
"""FP4 keys and values: e2m1 codes, two to a byte, and an e4m3 scale for each FP4_GROUP of them in a head's row."""
FP4_GROUP = 16
STORED_BYTES: Mapping[str, int] = {**KV_DTYPE_BYTES, "uint8": 1, "int32": 4}
"""Bytes of an element of a cache's tensor; tensors of bytes hold entries of several types."""
PACKED_LATENT_BYTES = 656
"""A packed latent of 512 columns with its rotary key: e4m3 numbers, a scale in fp32 for each 128 of them, 64 rotary
columns in bfloat16."""
_SPELLINGS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def kv_cache_dtype(requested: str, model_dtype: str, quantization: QuantConfig | None = None) -> str:
    """Returns the dtype of the cache for --kv-cache-dtype (`requested`). "auto" is what a quantized checkpoint was made
    for, else the model's dtype. Raises UserError for an unknown name."""
    stated = quantization.kv_cache if quantization is not None else None
    name = stated or model_dtype if requested == "auto" else _SPELLINGS.get(requested, requested)
    if name not in (*KV_DTYPE_BYTES, FP4_KV):
        known = ", ".join((*KV_DTYPE_BYTES, FP4_KV))
        if requested == "auto" and quantization is not None:
            raise UserError(
                f"{quantization.source}: {stated} has no cache here. --kv-cache-dtype bf16 serves the checkpoint, and"
                " so does fp8_e4m3, with the scales that it has."
            )
        raise UserError(f"--kv-cache-dtype {requested} is not known; use auto, {known}")
    return name


def value_bytes(dtype: str) -> float:
    """Returns the bytes of one element of a key or value, its share of a scale included."""
    return 0.5 + 1 / FP4_GROUP if dtype == FP4_KV else KV_DTYPE_BYTES[dtype]


def has_tensor_scales(dtype: str) -> bool:
    """Returns whether keys and values are divided by a layer's scales, which a checkpoint may give, before they are
    stored."""
    return dtype.startswith("fp8") or dtype == FP4_KV


def refuse_fp4(dtype: str, what: str) -> None:
    """Raises UserError if `dtype` is FP4, for a layer that cannot have such a cache. `what`: which cache, and why."""
    if dtype == FP4_KV:
        raise UserError(
            f"--kv-cache-dtype {FP4_KV} serves keys and values of grouped-query attention that every rank holds whole:"
            f" {what}. --kv-cache-dtype fp8_e4m3 or bf16 works."
        )
