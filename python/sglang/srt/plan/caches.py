"""Groups a model's caches: those of a group have the same lifetime and the same number of entries for a token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sglang.srt.plan.cache_spec import FULL, CacheSpec, Full, Lifetime, PerRequest, Window
from sglang.srt.plan.equal_layers import of_each
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import ONE_RANK


@dataclass(frozen=True, slots=True)
class CacheOfLayer:
    """A cache, with the layer that it belongs to."""

    layer_id: int
    cache: CacheSpec


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches with the same lifetime and number of entries for a token. They share one page allocator and one table of
    rows. A cache is addressed by its group and its index in `members`. `dcp_size`: as in CacheSpec; this rank has the
    entries of 1/dcp_size of the tokens."""

    lifetime: Lifetime
    entries_per_token: Fraction
    members: tuple[CacheOfLayer, ...]
    dcp_size: int = 1

    @property
    def page_multiple(self) -> int:
        """Fewest tokens of a page that holds whole entries, and whole runs of entries that must be contiguous."""
        return math.lcm(self.entries_per_token.denominator, *(member.cache.neighbours for member in self.members))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.cache.name for member in self.members))

    @property
    def num_caches(self) -> int:
        return len(self.members)

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one entry of all the group's caches, on one rank."""
        return sum(member.cache.entry_bytes for member in self.members)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes for every token that is kept; 0 for caches that do not grow with the request."""
        return self.bytes_per_entry * self.entries_per_token if isinstance(self.lifetime, Full) else Fraction(0)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of every running request besides those of its tokens."""
        if isinstance(self.lifetime, Window):
            return self.bytes_per_entry * self.lifetime.tokens
        return self.bytes_per_entry if isinstance(self.lifetime, PerRequest) else 0

    def describe(self) -> dict[str, Any]:
        return {
            "caches": list(self.names),
            "num_caches": self.num_caches,
            "kept_for": self._kept_for(),
            "entries_per_token": str(self.entries_per_token),
            "dcp_size": self.dcp_size,
            "bytes_per_entry": self.bytes_per_entry,
        }

    def _kept_for(self) -> str:
        if isinstance(self.lifetime, Window):
            if self.lifetime.chunked:
                return f"the current {self.lifetime.tokens:,} tokens"
            return f"the last {self.lifetime.tokens:,} tokens"
        return "all tokens" if isinstance(self.lifetime, Full) else "the request"

    def __str__(self) -> str:
        """Describes the group for people: "42 (compressed, index) for all tokens, 1/4 entries a token: 26,880 B an
        entry"."""
        rate = "" if self.entries_per_token == 1 else f", {self.entries_per_token} entries a token"
        rate = f"; {self.dcp_size} ranks share the tokens out" if self.dcp_size > 1 else rate
        unit = "a request" if isinstance(self.lifetime, PerRequest) else "an entry"
        names = ", ".join(self.names)
        return f"{self.num_caches} ({names}) for {self._kept_for()}{rate}: {self.bytes_per_entry:,} B {unit}"


def cache_groups(model: ModelDescription, parallel: ParallelConfig) -> tuple[CacheGroup, ...]:
    """Groups the caches of the model's layers, in the order in which layers need them."""
    return group_caches(of_each(model.layers, lambda layer: layer.caches(parallel)))


def ranks_share_caches(model: ModelDescription, parallel: ParallelConfig) -> bool:
    """Returns whether every rank has the same caches as a server with one rank: nothing is divided by heads or
    tokens."""
    return cache_groups(model, parallel) == cache_groups(model, replace(parallel, ranks=ONE_RANK))


def group_caches(layers: Iterable[Sequence[CacheSpec]]) -> tuple[CacheGroup, ...]:
    """Groups caches by lifetime and rate of entries. `layers`: the caches of each layer."""
    members: dict[tuple[Lifetime, Fraction, int], list[CacheOfLayer]] = {}
    for layer_id, caches in enumerate(layers):
        for cache in caches:
            kind = (cache.lifetime, cache.entries_per_token, cache.dcp_size)
            members.setdefault(kind, []).append(CacheOfLayer(layer_id, cache))
    return tuple(
        CacheGroup(lifetime, rate, tuple(caches), dcp_size) for (lifetime, rate, dcp_size), caches in members.items()
    )


def row_tables(groups: Sequence[CacheGroup]) -> tuple[Full | Window, ...]:
    """Returns the lifetimes that need a table with the place of each token of a request. The first is FULL, whose table
    caches of every rate share; it exists even if nothing is kept that long, because cached prefixes are known by it."""
    windows = (group.lifetime for group in groups if isinstance(group.lifetime, Window))
    return (FULL, *dict.fromkeys(windows))
