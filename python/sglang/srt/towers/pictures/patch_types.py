"""Conversion of patches to the encoder's type: 16 bits halve the bytes that travel to every rank."""

from __future__ import annotations

import numpy as np

_BLOCK = 1 << 17
"""Values that are converted at a time; they fit in the caches of a core."""


def as_type(pixels: np.ndarray, dtype: str) -> np.ndarray:
    """Converts [...] float32 without NaN to "float32", "float16" or "bfloat16" (returned as int16 bits), rounding to
    nearest even as torch does."""
    if dtype != "bfloat16":
        return pixels.astype(dtype, copy=False)
    flat = np.ascontiguousarray(pixels).reshape(-1).view(np.uint32)
    result = np.empty(flat.shape, np.int16)
    for first in range(0, len(flat), _BLOCK):
        bits = flat[first : first + _BLOCK]
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        result[first : first + _BLOCK] = rounded.astype(np.uint16).view(np.int16)
    return result.reshape(pixels.shape)
