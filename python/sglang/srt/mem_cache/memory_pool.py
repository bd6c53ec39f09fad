"""Device storage of a model's caches, by group and index in the group (`plan.caches.CacheGroup`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.plan.cache_spec import CacheSpec, CacheTensor, PerRequest, Window
from sglang.srt.plan.caches import CacheGroup, row_tables
from sglang.srt.plan.pool_sizes import STATE_COPY_BYTES, PoolSizes

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
    "int32": torch.int32,
}


class CacheStore:
    """The cache of one layer. The block that owns it gets it from its scope; the pools fill in its tensors before the
    first step.

    `table` is the row table with the tokens' slots: `batch.slots_of(store)`. Quantized keys and values are stored
    divided by `k_scale` and `v_scale`, which are fixed before the first token is stored: captured graphs keep them.
    """

    __slots__ = ("_tensors", "k_scale", "layer_id", "name", "table", "v_scale")

    def __init__(self, layer_id: int, name: str) -> None:
        self.layer_id = layer_id
        self.name = name
        self.table = 0
        self.k_scale = self.v_scale = 1.0
        self._tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns one of its tensors, [entries, ...], by its name in `CacheSpec.tensors`."""
        return self._tensors[name]

    @property
    def k(self) -> torch.Tensor:
        """Returns the keys [entries, Hkv, D]; of four-bit keys the codes [entries, Hkv, D / 2] uint8."""
        return self._tensors["k"]

    @property
    def v(self) -> torch.Tensor:
        """Returns the values [entries, Hkv, Dv]; of an MLA latent the first columns of `k`."""
        return self._tensors["v"]

    @property
    def quantized(self) -> bool:
        """Returns whether each entry has a scale."""
        return "scale" in self._tensors

    def group_scales(self) -> dict[str, torch.Tensor]:
        """Returns the scales of four-bit keys and values, [entries, Hkv, D / 16], as kernel arguments besides `k` and
        `v`; empty for other types."""
        return {name: tensor for name, tensor in self._tensors.items() if name in ("k_group_scales", "v_group_scales")}

    def bind(self, tensors: dict[str, torch.Tensor], table: int) -> None:
        """Sets its tensors by name, and its row table."""
        self._tensors, self.table = tensors, table


class CachePools:
    """All caches of a rank. Entry 0 of a token cache, and all of page 0, belong to the padding rows of a batch."""

    def __init__(self, groups: Sequence[CacheGroup], sizes: PoolSizes, device: str | torch.device) -> None:
        self.groups = tuple(groups)
        self.tables = row_tables(groups)
        self.states: list[torch.Tensor] = []
        """[caches, rows, ...] for each kind of state tensor: all are copied row by row at once."""
        self.tensors = [self._allocate(group, self._entries(group, sizes), device) for group in self.groups]
        self._place = {
            (member.layer_id, member.cache.name): (number, index)
            for number, group in enumerate(self.groups)
            for index, member in enumerate(group.members)
        }

    def _allocate(self, group: CacheGroup, entries: int, device: str | torch.device) -> list[dict[str, torch.Tensor]]:
        if not isinstance(group.lifetime, PerRequest):
            return [_allocate(member.cache, entries, device) for member in group.members]
        kinds: dict[CacheTensor, list[int]] = {}
        for index, member in enumerate(group.members):
            for spec in member.cache.tensors:
                kinds.setdefault(spec, []).append(index)
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in group.members]
        for spec, members in kinds.items():
            shape = (len(members), entries, *spec.shape)
            self.states.append(_zeros(shape, spec.dtype, device))
            for index, tensor in zip(members, self.states[-1], strict=True):
                tensors[index][spec.name] = tensor
        return tensors

    def table_tensors(self, table: int) -> list[tuple[int, torch.Tensor]]:
        """Returns the tensors whose entries a row table places, each with its layer, without views of others."""
        return [
            (member.layer_id, tensors[spec.name])
            for group, caches in zip(self.groups, self.tensors, strict=True)
            if not isinstance(group.lifetime, PerRequest) and self.tables.index(group.lifetime) == table
            for member, tensors in zip(group.members, caches, strict=True)
            for spec in member.cache.tensors
            if not spec.view_of
        ]

    def copy_states(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies rows [N] int64 of every state; all sources are read before a target is written. Works in parts, so
        that data read but not written yet takes at most STATE_COPY_BYTES."""
        for states in self.states:
            rows = states.flatten(2)  # [caches, rows, elements]
            step = max(1, STATE_COPY_BYTES // (len(rows) * len(targets) * rows.element_size()))
            for part in rows.split(step, dim=2):
                part[:, targets] = part[:, sources]

    def _entries(self, group: CacheGroup, sizes: PoolSizes) -> int:
        """Returns the entries of a group: one page more than the plan counts, because page 0 is padding."""
        if isinstance(group.lifetime, PerRequest):
            return sizes.state_rows
        if isinstance(group.lifetime, Window):
            tokens = sizes.windows[self.tables.index(group.lifetime) - 1].tokens
        else:
            tokens = sizes.tokens
        entries = (tokens + sizes.page_size) * group.entries_per_token
        assert entries.denominator == 1, "a page holds whole entries"
        return entries.numerator

    def bind(self, stores: Sequence[CacheStore]) -> None:
        """Gives each store its tensors."""
        for store in stores:
            number, index = self._place[store.layer_id, store.name]
            store.bind(self.tensors[number][index], self._table_of(self.groups[number]))

    def _table_of(self, group: CacheGroup) -> int:
        """Returns the number of the group's row table, or, for ranks that shard tokens, of the table of all tokens that
        comes after the row tables."""
        if group.dcp_size > 1:
            return len(self.tables)
        return 0 if isinstance(group.lifetime, PerRequest) else self.tables.index(group.lifetime)

    def size_bytes(self) -> int:
        """Returns the bytes of all caches of this rank."""
        return sum(
            group.bytes_per_entry * len(next(iter(caches[0].values())))
            for group, caches in zip(self.groups, self.tensors, strict=True)
            if caches
        )


def _allocate(cache: CacheSpec, entries: int, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Allocates zeros, because attention multiplies masked positions by zero and stale memory may hold NaN."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in cache.tensors:
        if spec.view_of:
            tensors[spec.name] = tensors[spec.view_of][..., : spec.shape[-1]]
        else:
            tensors[spec.name] = _zeros((entries, *spec.shape), spec.dtype, device)
    return tensors


def _zeros(shape: Sequence[int], name: str, device: str | torch.device) -> torch.Tensor:
    """Returns zeros of a cache dtype name of the plan. In main memory the system zeroes a page at its first use, so a
    server neither writes a large pool at its start nor takes memory for pages that are never filled."""
    dtype = storage_dtype(name)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def storage_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a cache dtype name of the plan."""
    try:
        return STORAGE_DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown KV cache dtype {name!r}; known: {', '.join(STORAGE_DTYPES)}") from None
