"""Description of a layer for the attention backend that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite


@dataclass(slots=True)
class AttentionLayer:
    """Attention of one layer over the paged cache. Head counts are those of this rank."""

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
    """> 0: scores of keys at each distance below it get a bias, which comes with the queries."""
    top_k: int = 0
    """> 0: attention is over so many tokens that an indexer selects."""
    dcp_size: int = 1
    """> 1: so many ranks share out the tokens of the cache."""
    site: AttentionSite = field(init=False)

    def __post_init__(self) -> None:
        self.v_head_dim = self.v_head_dim or self.head_dim
        shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        self.site = AttentionSite(shape, self.sliding_window, self.top_k, self.dcp_size, self.chunked)
