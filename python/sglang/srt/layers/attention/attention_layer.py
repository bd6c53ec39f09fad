"""The description of an attention layer, which attention backends read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite


@dataclass(slots=True)
class AttentionLayer:
    """Parameters of one layer's attention over the paged KV cache. Head counts are those of this rank."""

    cache: CacheStore
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    v_head_dim: int = 0
    """0: the same as head_dim."""
    sliding_window: int = 0
    """Each query sees itself and the `sliding_window - 1` tokens before it; 0: all."""
    chunked: bool = False
    """Each query sees the tokens up to itself from the last multiple of `sliding_window` on instead."""
    logit_cap: float = 0.0
    sinks: torch.Tensor | None = None
    """[num_heads] fp32: an extra logit a head that takes part in the softmax and has no value."""
    bias_extent: int = 0
    """> 0: keys at distances below it get a score bias by distance, which comes with the queries."""
    top_k: int = 0
    """> 0: attention covers at most this number of tokens, selected by an indexer."""
    dcp_size: int = 1
    """Number of DCP ranks that shard the tokens of the cache; 1: not sharded."""
    site: AttentionSite = field(init=False)

    def __post_init__(self) -> None:
        self.v_head_dim = self.v_head_dim or self.head_dim
        shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        self.site = AttentionSite(shape, self.sliding_window, self.top_k, self.dcp_size, self.chunked)
