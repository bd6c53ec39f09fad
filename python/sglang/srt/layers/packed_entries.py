"""Stores rows, which other kernels have written in the model's dtype, in caches of eight or four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.native_latent_records import LATENT_RECORD_STORE
from sglang.srt.layers.ops import INDEX_KEY_STORE
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.latent_record import LatentRecord

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.plan import Plan


class PackedRecords:
    """Stores latents or entries as records."""

    def __init__(self, plan: Plan, record: LatentRecord) -> None:
        self.record, self.columns = record, record.dim
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.store = plan.entry(LATENT_RECORD_STORE)

    def __call__(self, rows: torch.Tensor, cache: CacheStore, slots: torch.Tensor) -> None:
        """Stores rows [T, 1, D] at slots [T], but none at negative ones."""
        self.store(rows[:, 0], cache.k, slots, self.record)


class PackedKeys:
    """Stores an indexer's keys of `columns` columns in e4m3, each with a scale."""

    def __init__(self, plan: Plan, columns: int) -> None:
        self.columns, self.dtype = columns, getattr(torch, plan.dtype)
        self.store = plan.entry(INDEX_KEY_STORE)

    def __call__(self, rows: torch.Tensor, cache: CacheStore, slots: torch.Tensor) -> None:
        """Stores rows [T, 1, D] at slots [T], but none at negative ones."""
        self.store(rows[:, 0], cache.k, cache["scale"], slots)


Packing = PackedRecords | PackedKeys


def packed_records(plan: Plan, record: LatentRecord | None) -> PackedRecords | None:
    """Returns how latents are packed; None: kernels write them as they are stored."""
    return None if record is None else PackedRecords(plan, record)


def packed_keys(plan: Plan, columns: int) -> PackedKeys | None:
    """Returns how the keys of an indexer that stand for several tokens are packed, as `packed_records`."""
    return PackedKeys(plan, columns) if has_tensor_scales(plan.kv_cache_dtype) else None


def rows_to_pack(packing: Packing, count: int, device: torch.device) -> torch.Tensor:
    """Returns rows [count, 1, D] for a kernel to write."""
    return torch.empty((count, 1, packing.columns), dtype=packing.dtype, device=device)


def key_scales(keys: CacheStore) -> torch.Tensor | None:
    """Returns the scales of an indexer's keys; None of keys in 16 bits or more."""
    return keys["scale"] if keys.quantized else None


def token_numbers(batch: ForwardBatch) -> torch.Tensor:
    """Returns [T] int64: 0, 1, 2, ..., created once per step."""
    name = "token_numbers"
    if name not in batch.step_cache:
        batch.step_cache[name] = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    return batch.step_cache[name]
