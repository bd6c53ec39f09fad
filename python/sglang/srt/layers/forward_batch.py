"""The device's view of one step: which tokens it computes, for which requests, and where they lie in the caches.

A step has up to two kinds of rows. Requests that decode bring one token each and come first; behind them come requests
with a run of new tokens over a cached prefix: prompts, chunks of prompts, or guesses to verify.

    tokens    0 .. D-1                D .. T-1
    rows      decode: DecodeRows      extend: ExtendRows, ragged by start_loc
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.metadata import SiteMetadata
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.plan.layer_spec import AttentionSite


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Inputs that are no tokens: rows [N, H] in place of the embeddings of the tokens `index` [N] of T."""

    index: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where the tokens of a batch lie in the caches of one row table.

    Caches of 1/r entries a token keep the entry of tokens p - r + 1 .. p, where r divides p + 1, at the slot of token p
    divided by r: pages hold whole entries.
    """

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32, cache slot of each position
    out_cache_loc: torch.Tensor  # [T] int64, cache slot of each new token


@dataclass(slots=True)
class DecodeRows:
    """D requests that bring one token each: the first D tokens of a step.

    Under CUDA graphs D is the padded size. Padding rows have request slot 0, cache slot 0 and length 1. In a graph with
    prompts they lie over the first tokens of the prompts: what is computed for a decoding row is written before what is
    computed for a prompt.
    """

    req_pool_indices: torch.Tensor  # [D] int64, request slot: the row of req_to_token and of states
    seq_lens: torch.Tensor  # [D] int32, length including the new token
    token_slots: tuple[TokenSlots, ...]  # of the D tokens, one for each row table
    seq_lens_cpu: list[int] | None = None
    """None while a CUDA graph is captured; the longest length is then bounded by the context length only."""

    def __len__(self) -> int:
        return len(self.req_pool_indices)


@dataclass(slots=True)
class ExtendRows:
    """P requests with a run of new tokens each, over a cached prefix."""

    req_pool_indices: torch.Tensor  # [P] int64
    seq_lens: torch.Tensor  # [P] int32, length including the new tokens
    prefix_lens: torch.Tensor  # [P] int32, cached tokens before them
    start_loc: torch.Tensor  # [P + 1] int32, first of T of each request, and the end
    token_slots: tuple[TokenSlots, ...]  # of all T tokens of the step
    new_lens_cpu: list[int]
    prefix_lens_cpu: list[int]
    seq_lens_cpu: list[int] | None = None
    """None while a CUDA graph is captured, and where the device alone knows: the lengths on the host are bounds."""

    def __len__(self) -> int:
        return len(self.req_pool_indices)


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of the requests of one step; device tensors unless the name ends in `_cpu`."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, or [sections, T] where the frequencies of rotary embeddings have sections
    token_slots: tuple[TokenSlots, ...]
    """One for each row table; a block takes that of its cache: `slots_of`."""
    decode: DecodeRows | None = None
    extend: ExtendRows | None = None
    metadata: Mapping[AttentionSite, SiteMetadata] = field(default_factory=dict)
    """What the kernels of each attention site read of this step (`AttentionSites.metadata`)."""

    num_valid_tokens: torch.Tensor | None = None
    """[1] int32: tokens from here on are padding, which experts need not compute. None: all are valid."""

    embedding_rows: EmbeddingRows | None = None

    handed_on: dict[str, torch.Tensor] = field(default_factory=dict)
    """What one part of the model leaves for later ones of the same step, by name."""

    @property
    def num_decodes(self) -> int:
        return 0 if self.decode is None else len(self.decode)

    def slots_of(self, cache: CacheStore) -> TokenSlots:
        return self.token_slots[cache.table]
