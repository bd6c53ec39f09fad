"""The device's view of one step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVPool


class ForwardMode(Enum):
    """EXTEND: each request brings one or more new tokens over a cached prefix, behind those that decode in the same
    step. DECODE: each brings exactly one."""

    EXTEND = auto()
    DECODE = auto()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Inputs that are no tokens: rows [N, H] in place of the embeddings of the tokens `index` [N] of T."""

    index: torch.Tensor
    rows: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """B requests with T new tokens in total; device tensors unless the name ends in `_cpu`.

    In DECODE T == B, and under CUDA graphs B is the padded size: padding rows have `seq_lens` 1, request slot 0 and
    cache slot 0, which no request owns.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, or [sections, T] where the frequencies of rotary embeddings have sections
    req_pool_indices: torch.Tensor  # [B] int64, row of req_to_token
    seq_lens: torch.Tensor  # [B] int32, length including the new tokens
    out_cache_loc: torch.Tensor  # [T] int64, cache slot of each new token

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32, cache slot of each position
    kv_pool: KVPool
    attn_backend: AttentionBackend

    num_valid_tokens: torch.Tensor | None = None
    """[1] int32: tokens from here on are padding, which experts need not compute. None: all are valid."""

    embedding_rows: EmbeddingRows | None = None

    decodes: ForwardBatch | None = None
    """EXTEND only: the requests that decode in this step, as a DECODE batch. Their tokens are the first of T; B and the
    fields of requests do not count them. Under CUDA graphs their padding rows lie over the first prompt tokens: what is
    computed for a decoding row is written before what is computed for a prompt."""

    # EXTEND only
    extend_seq_lens: torch.Tensor | None = None  # [B] int32, new tokens of each request
    extend_prefix_lens: torch.Tensor | None = None  # [B] int32, cached tokens before them
    extend_start_loc: torch.Tensor | None = None  # [B + 1] int32, first of T of each request, and the end
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None

    seq_lens_cpu: list[int] | None = None
    """None while a CUDA graph is captured; the longest length is then bounded by the context length only."""
