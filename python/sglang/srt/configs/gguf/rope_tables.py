"""Finds the parameters of Llama 3's rotary scaling, of which a GGUF file has only the resulting table. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.gguf.files import GGUFModel
from sglang.srt.errors import UserError

TABLE = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0
_LENGTHS = tuple(1 << power for power in range(5, 21))
_TOLERANCE = 1e-3


def llama3_scaling(model: GGUFModel, head_dim: int, theta: float) -> Mapping[str, Any]:
    """Returns rope_scaling whose divisors of the frequencies are those of the table, with the low_freq_factor 1 and
    high_freq_factor 4 of every published Llama 3. Raises UserError if there is none."""
    file, info = model.tensors()[TABLE]
    path = model.headers[file].path
    if info.type.name != "F32" or info.shape != (head_dim // 2,) or theta <= 0:
        raise UserError(f"{path}: {TABLE} must be {head_dim // 2} numbers in F32.")
    with path.open("rb") as opened:
        opened.seek(info.offset)
        table = struct.unpack(f"<{head_dim // 2}f", opened.read(info.num_bytes))
    if not all(1 <= divisor < 1e6 for divisor in table):
        raise UserError(f"{path}: {TABLE} must be divisors of frequencies from 1 on; got {table[:8]}.")
    factor = float(f"{max(table):.4g}")
    for original in _LENGTHS:
        divisors = llama3_divisors(head_dim, theta, factor, original)
        if all(abs(ours - theirs) <= _TOLERANCE * theirs for ours, theirs in zip(divisors, table, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise UserError(f"{path}: {TABLE} is not the table of a Llama 3 (low_freq_factor 1, high_freq_factor 4).")


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> list[float]:
    """Returns by what Llama 3's scaling divides each frequency: 1 for wavelengths that fit `original` four times,
    `factor` for those that do not fit once, and a mean of both between."""
    divisors = []
    for i in range(head_dim // 2):
        fits = original / (2 * math.pi * theta ** (2 * i / head_dim))  # wavelengths in the original context
        share = min(max((fits - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors
