"""The types in which caches are kept."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.configs.quant_rules import QuantConfig
from sglang.srt.errors import UserError

KV_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
STORED_BYTES: Mapping[str, int] = {**KV_DTYPE_BYTES, "uint8": 1, "int32": 4}
"""Bytes of an element of a cache's tensor; tensors of bytes hold entries of several types."""
PACKED_LATENT_DIMS, PACKED_LATENT_BYTES = (576, 512), 656
"""Dims of a packed latent with its rotary key and of the latent alone; bytes of the packed entry: 512 e4m3 numbers, a
scale in fp32 for each 128 of them, 64 rotary columns in bfloat16."""
_SPELLINGS: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def kv_cache_dtype(requested: str, model_dtype: str, quantization: QuantConfig | None = None) -> str:
    """Returns the dtype name of the cache for --kv-cache-dtype; "auto" is what a quantized checkpoint was made for, or
    else the model's dtype. Raises UserError."""
    stated = quantization.kv_cache if quantization is not None else None
    name = stated or model_dtype if requested == "auto" else _SPELLINGS.get(requested, requested)
    if name not in KV_DTYPE_BYTES:
        raise UserError(f"--kv-cache-dtype {requested} is not known; use auto, {', '.join(KV_DTYPE_BYTES)}")
    return name
