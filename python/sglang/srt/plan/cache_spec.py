"""The caches of a layer: tensors with entries of tokens or of requests, and how long entries are kept. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from sglang.srt.plan.kv_spec import FP4_GROUP, FP4_KV, PACKED_LATENT_BYTES, STORED_BYTES, refuse_fp4


@dataclass(frozen=True, slots=True)
class Full:
    """Lifetime of entries that are kept until their token is freed."""


@dataclass(frozen=True, slots=True)
class Window:
    """Lifetime of entries that are kept for the last `tokens` tokens of a request. With `chunked` the sequence is cut
    into chunks of `tokens` tokens from its beginning, and only the entries of the next token's chunk are kept."""

    tokens: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Lifetime of an entry that each running request has once, whatever its length (a recurrent state)."""


FULL, PER_REQUEST = Full(), PerRequest()
Lifetime = Full | Window | PerRequest


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a cache, [entries, *shape]. With `view_of` it is a view of the first columns of that tensor and
    takes no memory."""

    name: str  # "k", "v", "scale", "conv", ...
    shape: tuple[int, ...]
    dtype: str
    view_of: str = ""

    @property
    def entry_bytes(self) -> int:
        return 0 if self.view_of else math.prod(self.shape) * STORED_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache of one layer, on one rank. Its name is unique in the layer.

    `entries_per_token` 1/4: one entry for every fourth token. A PER_REQUEST cache has one entry for each request.
    `neighbours`: the entries of that many tokens, starting at a multiple of it, are contiguous (blocks that an indexer
    selects).
    """

    name: str  # "kv", "latent", "index", "compressed", "state"
    tensors: tuple[CacheTensor, ...]
    entries_per_token: Fraction = Fraction(1)
    lifetime: Lifetime = FULL
    dcp_size: int = 1
    """Number of ranks over which the tokens are sharded: this one keeps the entries of every dcp_size-th position."""
    neighbours: int = 1

    @property
    def entry_bytes(self) -> int:
        return sum(tensor.entry_bytes for tensor in self.tensors)


def key_value_cache(
    name: str, heads: int, head_dim: int, v_head_dim: int, dtype: str, lifetime: Lifetime = FULL
) -> CacheSpec:
    """Returns a cache of keys [heads, head_dim] and values [heads, v_head_dim] of every token. Raises UserError where a
    4-bit dtype's scale groups do not divide the head dims."""
    if dtype == FP4_KV:
        return _fp4_cache(name, heads, {"k": head_dim, "v": v_head_dim}, lifetime)
    tensors = (CacheTensor("k", (heads, head_dim), dtype), CacheTensor("v", (heads, v_head_dim), dtype))
    return CacheSpec(name, tensors, lifetime=lifetime)


def _fp4_cache(name: str, heads: int, dims: dict[str, int], lifetime: Lifetime) -> CacheSpec:
    tensors: list[CacheTensor] = []
    for part, dim in dims.items():
        if dim % FP4_GROUP:
            refuse_fp4(FP4_KV, f"heads of {dim} dims are no multiple of {FP4_GROUP}, which share a scale")
        tensors.append(CacheTensor(part, (heads, dim // 2), "uint8"))
        tensors.append(CacheTensor(f"{part}_group_scales", (heads, dim // FP4_GROUP), "uint8"))
    return CacheSpec(name, tuple(tensors), lifetime=lifetime)


def latent_cache(
    name: str,
    dim: int,
    v_dim: int,
    dtype: str,
    entries_per_token: Fraction = Fraction(1),
    lifetime: Lifetime = FULL,
) -> CacheSpec:
    """Returns a cache with one vector [1, dim] an entry, whose first `v_dim` elements are the value."""
    tensors = (CacheTensor("k", (1, dim), dtype), CacheTensor("v", (1, v_dim), dtype, view_of="k"))
    return CacheSpec(name, tensors, entries_per_token, lifetime)


def packed_latent_cache(name: str) -> CacheSpec:
    """Returns a cache whose entries are 656 bytes: a latent of 512 dims in e4m3 with its scales and a rotary key of 64
    in bfloat16."""
    return CacheSpec(name, (CacheTensor("k", (1, PACKED_LATENT_BYTES), "uint8"),))


def dcp_sharded(cache: CacheSpec, dcp_size: int) -> CacheSpec:
    """Returns the cache as one of `dcp_size` ranks holds it: the entries of every dcp_size-th token."""
    if dcp_size == 1:
        return cache
    return replace(cache, entries_per_token=cache.entries_per_token / dcp_size, dcp_size=dcp_size)
