"""The device's view of one step, and what an attention backend provides for it.

A step without a graph: the new tokens' slots enter `req_to_token`, then `init_forward_metadata`, then the model, which
stores keys and values of the new tokens before it calls `forward_*`.

A decode step as a CUDA graph has three moments, each with a method of its own:

| moment | method | on the host | on the device |
|---|---|---|---|
| once, before any capture | `init_cuda_graph_state` | allocate, plan, wait | anything |
| inside the capture | `init_forward_metadata_capture` | choose among what exists | work that each replay repeats |
| before each replay | `init_forward_metadata_replay` | plan; never wait for the step in flight | copies and kernels |

The graph itself enters the new tokens' slots in the table. So inside a capture the table is complete, and before a
replay it is not: a backend that reads pages there takes the last one of each request from `out_cache_loc`.

Before a capture the third is called once, for a batch of padding: what backends share between sizes is then this one's.

Prefill graphs exist only for backends whose KernelSpec says `graph_prefill`; their `init_forward_metadata` is then
called inside the capture, with the host lengths of the widest case, and not before replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.layers.attention.attention_layer import AttentionLayer

if TYPE_CHECKING:
    from sglang.srt.layers.attention.latent_chunks import LatentPrompts
    from sglang.srt.mem_cache.memory_pool import CacheStore


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


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where the tokens of a batch lie in the caches of one row table.

    Caches of 1/r entries a token keep the entry of tokens p - r + 1 .. p, where r divides p + 1, at the slot of token p
    divided by r: pages hold whole entries.
    """

    req_to_token: torch.Tensor  # [max_reqs + 1, context_len] int32, cache slot of each position
    out_cache_loc: torch.Tensor  # [T] int64, cache slot of each new token


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
    req_pool_indices: torch.Tensor  # [B] int64, request slot: the row of req_to_token and of states
    seq_lens: torch.Tensor  # [B] int32, length including the new tokens
    token_slots: tuple[TokenSlots, ...]
    """One for each row table; a block takes that of its cache: `slots_of`."""
    attn_backend: AttentionBackend

    num_valid_tokens: torch.Tensor | None = None
    """[1] int32: tokens from here on are padding, which experts need not compute. None: all are valid."""

    embedding_rows: EmbeddingRows | None = None

    decodes: ForwardBatch | None = None
    """EXTEND only: the requests that decode in this step, as a DECODE batch. Their tokens are the first of T; B and the
    fields of requests do not count them. Under CUDA graphs their padding rows lie over the first prompt tokens: what is
    computed for a decoding row is written before what is computed for a prompt."""

    # EXTEND only
    extend_prefix_lens: torch.Tensor | None = None  # [B] int32, cached tokens before them
    extend_start_loc: torch.Tensor | None = None  # [B + 1] int32, first of T of each request, and the end
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None

    shared_keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By layer id, keys and values of the new tokens that later layers attend to as well."""

    layer_inputs: torch.Tensor | None = None
    """[T, layers, size]: what tokens add in every layer, in models that have it. The model makes it."""

    latent_prompts: LatentPrompts | None = None
    """How latent attention computes the prompts: its first layer decides, for all of the step."""

    seq_lens_cpu: list[int] | None = None
    """None while a CUDA graph is captured; the longest length is then bounded by the context length only."""

    def slots_of(self, cache: CacheStore) -> TokenSlots:
        return self.token_slots[cache.table]


class AttentionBackend(Protocol):
    """Built once per model runner; state between calls is the metadata of the current batch only."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare one step that is not replayed (index arrays, split counts, wrapper plans). Where an EXTEND batch has
        `decodes`, both are prepared, one after the other; neither may spoil the other."""

    def init_cuda_graph_state(self, batch_sizes: tuple[int, ...]) -> None:
        """Everything that captured decode graphs of these batch sizes (ascending) will read, at its final address."""

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> None:
        """Metadata of a DECODE batch of static tensors, as part of the graph; also called in the runs that precede the
        capture. Reads no host lengths and neither plans nor waits."""

    def init_forward_metadata_replay(self, batch: ForwardBatch, num_reqs: int) -> None:
        """Refresh what the graph reads besides the static inputs, which are loaded. `batch.seq_lens_cpu` is that of the
        step; rows from `num_reqs` on are padding."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] of the new tokens (already stored) -> the rows of out
        [T, Hq, Dv] from extend_start_loc[0] on; the rows before it belong to requests that decode."""

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        """q [B, Hq, D] -> out [B, Hq, Dv]."""
