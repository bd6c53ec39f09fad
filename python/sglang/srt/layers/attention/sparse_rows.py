"""Decides which tokens of a step attend to an indexer's selection, and holds them.

Attention to the `top_k` tokens that an indexer selects, one by one or in blocks, equals dense attention while the
request has at most `top_k` tokens. So a step's decoding requests, and its prompts, each take one of two paths:

    dense     the host knows that none of them is longer than top_k: nothing is scored or selected
    sparse    others, and every step of a CUDA graph, whose requests may be of any length

Packed latents (`MLA.packed`) are read by sparse attention: with them prompts are dense only if they expand keys and
values of tokens that no cache holds, and requests up to top_k tokens attend to a selection of all their tokens. So do
all requests of models without an indexer, whose top_k is the context; their prompts also expand cached latents.

A selection of all tokens gives the same result as dense attention, so the path affects speed only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.layers.attention.part_merge import PartMerge
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.ops import BLOCK_ATTENTION, SPARSE_ATTENTION
from sglang.srt.layers.step_rows import requests_of_tokens

if TYPE_CHECKING:
    from sglang.srt.blocks.block_selection.spec import BlockIndexer
    from sglang.srt.blocks.mla.spec import MLA
    from sglang.srt.blocks.token_selection.spec import TokenIndexer
    from sglang.srt.layers.attention.attention_layer import AttentionLayer
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.layers.step_rows import ExtendRows
    from sglang.srt.plan.plan import Plan


@dataclass(slots=True)
class SparseRows:
    """N consecutive tokens of a step, from token `first` on; `entries`: what each may see, itself included.
    `with_decodes`, `with_prompts`: whether the step's decoding rows and prompts are among them."""

    site: SparseSite
    first: int
    entries: EntryRows
    with_decodes: bool
    with_prompts: bool
    selection: Selection | None = None
    """Selection of the latest layer with an indexer; later layers without one reuse it."""
    blocks: EntryRows | None = None
    """The blocks that each token may see, per KV head, if blocks are selected."""

    @property
    def tokens(self) -> slice:
        """Returns the slice of the step's tokens."""
        return slice(self.first, self.first + len(self.entries))

    @property
    def selects(self) -> bool:
        """Returns whether scores are needed; otherwise all visible entries are selected without any."""
        return self.entries.max_count > self.site.top_k

    def attend(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Fills out [N, heads, Dv] with the attention of q [N, heads, D] over the selected tokens of the layer's
        cache."""
        assert self.selection is not None, "no layer before this one selects tokens"
        self.site.attend(q, layer, self.selection, self.entries, out)


class SparseSite(ABC):
    """What layers with equal heads share when they attend to at most `top_k` selected tokens. `packed`: only sparse
    attention can read their cache."""

    def __init__(self, top_k: int, context_len: int, packed: bool = False) -> None:
        self.top_k, self.context_len, self.packed = top_k, context_len, packed

    @abstractmethod
    def attend(
        self, q: torch.Tensor, layer: AttentionLayer, selection: Selection, entries: EntryRows, out: torch.Tensor
    ) -> None:
        """Fills out [N, heads, Dv] for q [N, heads, D] of the tokens of `entries`."""

    def rows(self, batch: ForwardBatch, in_graph: bool) -> SparseRows | None:
        """Returns the step's sparse rows; None if the whole step is dense. In a graph prompt tokens may begin among
        padding rows of decoding requests, so a token's request is looked up on the device."""
        decode, extend = batch.decode, batch.extend
        decodes = 0 if decode is None else self._longest(None if in_graph else decode.seq_lens_cpu)
        prompts = 0 if extend is None else self._longest(extend.seq_lens_cpu)
        with_decodes = decodes > (0 if self.packed else self.top_k)
        over_packed = self.packed and extend is not None and not self.expands(extend)
        with_prompts = prompts > (0 if over_packed else self.top_k)
        if not with_decodes and not with_prompts:
            return None
        longest = max(decodes if with_decodes else 0, prompts if with_prompts else 0)
        count = batch.num_decodes
        tokens = slice(0 if with_decodes else count, len(batch.positions) if with_prompts else count)
        if extend is None or not with_prompts:
            assert decode is not None
            requests = decode.req_pool_indices
        else:
            owners = requests_of_tokens(extend.start_loc, extend.req_pool_indices, decode, len(batch.positions))
            requests = owners[tokens]
        lens = (batch.positions[tokens] + 1).to(torch.int32)
        run = max(extend.new_lens_cpu) if extend is not None and with_prompts else 1
        entries = EntryRows(batch.token_slots[0].req_to_token, requests, lens, longest, run=run)
        rows = SparseRows(self, tokens.start, entries, with_decodes, with_prompts)
        if not rows.selects:
            rows.selection = self.select_all(entries)
        rows.blocks = self.blocks(entries)
        return rows

    def expands(self, extend: ExtendRows) -> bool:
        """Returns whether a step's prompts attend to expanded keys and values, as far as the host knows, without sparse
        attention to packed latents."""
        return False

    def select_all(self, entries: EntryRows) -> Selection:
        """Returns the selection of all that the tokens see."""
        return entries.all()

    def blocks(self, entries: EntryRows) -> EntryRows | None:
        """Returns the blocks of these tokens; None for sites that do not select blocks."""
        return None

    def _longest(self, seq_lens: Sequence[int] | None) -> int:
        return min(self.context_len, max(seq_lens)) if seq_lens is not None else self.context_len


class LatentSite(SparseSite):
    """Layers that attend to latents of selected tokens, the same ones for all heads."""

    def __init__(self, spec: MLA, plan: Plan) -> None:
        packed = spec.packed(plan.kv_cache_dtype)
        super().__init__(spec.top_k if spec.sparse else plan.context_len, plan.context_len, packed)
        self.spec, self.record = spec, spec.record(plan.kv_cache_dtype)
        self.attention = plan.entry(SPARSE_ATTENTION)
        self.merge = PartMerge(plan)
        self._own: tuple[Selection, Selection] | None = None

    def attend(
        self, q: torch.Tensor, layer: AttentionLayer, selection: Selection, entries: EntryRows, out: torch.Tensor
    ) -> None:
        if layer.dcp_size == 1:
            self.attention(
                q, ((layer.cache.k, selection),), out, scale=layer.scale, sinks=layer.sinks, **self._form(layer)
            )
            return
        local = self._own_selection(selection)

        def attend(heads: torch.Tensor, parts: torch.Tensor, lse: torch.Tensor) -> None:
            self.attention(heads, ((layer.cache.k, local),), parts, scale=layer.scale, lse=lse, **self._form(layer))

        self.merge.attend(q, attend, out, layer.sinks)

    def _form(self, layer: AttentionLayer) -> dict[str, Any]:
        """Returns how the layer's latents are stored, if they are records."""
        return {} if self.record is None else {"record": self.record, "record_scale": layer.cache.k_scale}

    def expands(self, extend: ExtendRows) -> bool:
        if extend.seq_lens_cpu is None or (self.spec.sparse and any(extend.prefix_lens_cpu)):
            return False
        return self.spec.expanding_pays(extend.prefix_lens_cpu, extend.new_lens_cpu)

    def select_all(self, entries: EntryRows) -> Selection:
        return entries.all() if self.spec.sparse else entries.in_table()

    def _own_selection(self, selection: Selection) -> Selection:
        """Returns this rank's part of the selection with DCP, computed once for all layers that use the selection."""
        if self._own is None or self._own[0] is not selection:
            context = self.merge.context
            self._own = (selection, selection.select_rank(context.rank, context.size))
        return self._own[1]


class BlockSite(SparseSite):
    """Layers whose KV heads each attend to their own selected blocks of tokens, or all to the same tokens."""

    def __init__(self, indexer: BlockIndexer | TokenIndexer, kv_heads: int, plan: Plan) -> None:
        """`kv_heads`: KV heads of one rank."""
        super().__init__(indexer.top_k, plan.context_len)
        self.block, self.kv_heads, self.of_each_head = indexer.block, kv_heads, indexer.of_each_head
        self.attention = plan.entry(BLOCK_ATTENTION)

    def blocks(self, entries: EntryRows) -> EntryRows | None:
        return entries.blocks(self.block, self.kv_heads) if self.of_each_head else None

    def attend(
        self, q: torch.Tensor, layer: AttentionLayer, selection: Selection, entries: EntryRows, out: torch.Tensor
    ) -> None:
        cache = layer.cache
        self.attention(
            q,
            cache.k,
            cache.v,
            selection,
            entries.counts,
            self.block,
            out,
            scale=layer.scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
