"""Device storage of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.plan.kv_spec import KVSpec

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class KVPool:
    """Per layer `k` [num_slots, Hkv, D] and `v` [num_slots, Hkv, Dv], contiguous, indexed by token slot.

    `num_slots` counts the padding page too: the allocator's size + page_size. Quantized caches hold value / scale, with
    one scale a layer for keys and one for values.
    """

    def __init__(self, kv_spec: KVSpec, num_slots: int, device: str | torch.device) -> None:
        self.spec = kv_spec
        self.num_slots = num_slots
        self.dtype = storage_dtype(kv_spec.dtype)
        # Zeroed, because attention multiplies masked positions by zero and stale memory may hold NaN.
        self._k = [
            torch.zeros((num_slots, kv_spec.num_kv_heads, kv_spec.head_dim), dtype=self.dtype, device=device)
            for _ in range(kv_spec.num_layers)
        ]
        self._v = [
            torch.zeros((num_slots, kv_spec.num_kv_heads, kv_spec.v_head_dim), dtype=self.dtype, device=device)
            for _ in range(kv_spec.num_layers)
        ]
        self._k_scale = [1.0] * kv_spec.num_layers
        self._v_scale = [1.0] * kv_spec.num_layers

    def k(self, layer_id: int) -> torch.Tensor:
        return self._k[layer_id]

    def v(self, layer_id: int) -> torch.Tensor:
        return self._v[layer_id]

    def k_scale(self, layer_id: int) -> float:
        return self._k_scale[layer_id]

    def v_scale(self, layer_id: int) -> float:
        return self._v_scale[layer_id]

    def set_scales(self, layer_id: int, k_scale: float, v_scale: float) -> None:
        """Before the first token is stored: captured graphs keep the scales that they saw."""
        self._k_scale[layer_id] = k_scale
        self._v_scale[layer_id] = v_scale

    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._k, *self._v))


def storage_dtype(name: str) -> torch.dtype:
    """The torch dtype of a cache dtype name of the plan."""
    try:
        return STORAGE_DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown KV cache dtype {name!r}; known: {', '.join(STORAGE_DTYPES)}") from None
