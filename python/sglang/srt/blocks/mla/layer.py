"""Latent attention (MLA) of a decoder layer, from hidden states to hidden states.

Each token stores one latent and one rotary key, on every rank or, with DCP, on one (`token_shares`); heads are sharded
over ranks. W_UK and W_UV, the halves of `kv_b_proj`, are held in the model's dtype even if the checkpoint quantizes
them. Attention uses them in one of two ways:

    absorbed   W_UK takes the queries to the latent's dims, attention reads latents as they are (the values are their
               first columns), and W_UV makes the heads' outputs of what it returns: decoding, and short prompts
    expanded   keys and values are made of latents by W_UK and W_UV: prompts for which that pays

With an indexer, or an earlier layer's selection, tokens that see more than `top_k` tokens use absorbed attention over
the selected ones (`SparseRows`).

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mla.heads import LatentHeads, output_gate
from sglang.srt.blocks.mla.indexer import LightningIndexer
from sglang.srt.blocks.mla.reference import (
    LATENT_NORM_ROPE_STORE,
    LATENT_PACK_STORE,
    LATENT_PROMPT_ATTENTION,
)
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.layers.attention.cache_scale import LayerCacheScales
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.temperature import growth_of_queries
from sglang.srt.layers.block import Site
from sglang.srt.layers.native_latent_records import LATENT_RECORD_STORE
from sglang.srt.layers.ops import RMSNORM
from sglang.srt.layers.packed_entries import token_numbers
from sglang.srt.layers.parameter import Init, Scope, share_param
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.layer_spec import AttentionShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.attention.metadata import SiteMetadata
    from sglang.srt.layers.attention.sparse_rows import SparseRows
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.plan.plan import Plan


class LatentAttention(LatentHeads):
    """Latent attention (MLA), [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: MLA, site: Site) -> None:
        assert spec.rope is not None
        super().__init__(scope, spec, site)
        self.layer_id = site.layer_id
        self.cache = scope.cache(site.layer_id, "latent")
        kv_dtype = scope.plan.kv_cache_dtype
        self.record = spec.record(kv_dtype)
        if has_tensor_scales(kv_dtype) and not (spec.sparse or spec.window):
            LayerCacheScales(scope, self.cache, heads=1, latent=True)
        self.attention = Attention(
            self.cache,
            self.num_heads,
            1,
            spec.latent_dim,
            spec.softmax_scale,
            spec.kv_lora_rank,
            sliding_window=spec.window,
            top_k=spec.top_k,
            sinks=share_param(scope, "sinks", self.head_rows, Init.ZEROS, torch.float32) if spec.sinks else None,
            dcp_size=spec.effective_dcp_size(scope.groups.attention.size, scope.groups.context.size),
        )
        self.rotary, self.is_neox_style = site.rotary.of(spec.rope), spec.rope.is_neox_style
        self.indexer = None if spec.indexer is None else LightningIndexer(scope, spec.indexer, site)
        self.norm = scope.plan.entry(RMSNORM)
        key_norm = spec.norms.rotary_key
        self.key_norm = scope.sub("k_rope_norm").param("weight", (spec.rope_dim,), init=Init.ONES) if key_norm else None
        self.gate = None if spec.gate is None else output_gate(scope, spec, site, self.head_rows)
        self.store = scope.plan.entry(LATENT_NORM_ROPE_STORE)
        self.pack = self._packing(scope.plan) if spec.packed(kv_dtype) else None
        expanded = AttentionShape(self.num_heads, self.num_heads, spec.qk_dim, spec.v_dim)
        key = scope.plan.attention_op(LATENT_PROMPT_ATTENTION.name, expanded)
        self.attend_expanded = scope.plan.entry(LATENT_PROMPT_ATTENTION, key)

    def _packing(self, plan: Plan) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """Returns what stores entries [T, D] packed."""
        if self.record is None:
            return plan.entry(LATENT_PACK_STORE)
        store, record = plan.entry(LATENT_RECORD_STORE), self.record
        return lambda entries, cache, slots: store(entries, cache, slots, record, self.cache.k_scale)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        spec, cache = self.spec, self.cache
        q, latent = self.qkv_a(x).split(self.qkv_sizes, dim=-1)
        metadata = batch.metadata[self.attention.site]
        positions, cos_sin = rotation = self.rotary.at(batch.positions)
        if spec.q_lora_rank:
            q_latent = self.norm(q, self.q_norm, spec.norms.eps)
            q = self.q_b(q_latent)
            if self.indexer is not None:
                self._select(self.indexer, x, q_latent, rotation, batch, metadata.sparse)
        if spec.attn_temperature is not None:  # a rotation keeps factors
            q *= growth_of_queries(batch, spec.attn_temperature).to(q.dtype)
        q = q.unflatten(-1, (self.num_heads, spec.qk_dim))
        expanded = metadata.latent_chunks is not None
        num_absorbed = batch.num_decodes if expanded else len(x)
        absorbed = q.new_empty((num_absorbed, self.num_heads, spec.latent_dim))
        into, at = cache.k, batch.slots_of(cache).out_cache_loc
        if self.pack is not None:
            into, at = q.new_empty((len(x), 1, spec.latent_dim)), token_numbers(batch)
        entries = self.store(
            q,
            latent,
            absorbed,
            positions,
            cos_sin,
            self.kv_norm,
            spec.norms.eps,
            into,
            at,
            1.0 if self.pack is not None else cache.k_scale,
            self.is_neox_style,
            self.key_norm,
        )
        if self.pack is not None:
            self.pack(entries, cache.k, batch.slots_of(cache).out_cache_loc)
        if num_absorbed:
            self._absorb(q[:num_absorbed, :, : spec.nope_dim], absorbed[..., : spec.kv_lora_rank])
        out = q.new_empty((len(x), self.num_heads, spec.v_dim))
        if expanded:
            self._expanded(q, absorbed, entries, batch, metadata, out)
        else:
            self._absorbed(absorbed, entries, batch, out)
        heads = out.flatten(1)
        return self.out(heads if self.gate is None else self.gate(heads, x))

    def _select(
        self,
        indexer: LightningIndexer,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        rows: SparseRows | None,
    ) -> None:
        """Puts into `rows` the selection of the indexer, or that of an earlier pass of a draft."""
        shared = batch.shared_selection
        if shared is None or self.layer_id not in shared:
            indexer(x, q_latent, rotation, batch, rows)
            if shared is not None:
                shared.keep_tokens(self.layer_id, batch, rows, self.spec.top_k)
        elif rows is not None:
            rows.selection = shared.joined(self.layer_id, rows.entries)

    def _absorbed(self, q: torch.Tensor, entries: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Computes absorbed attention for all rows of the step."""
        keys = entries[:, None]
        attended = self.attention(q, keys, keys[..., : self.spec.kv_lora_rank], batch)
        self._values(attended.unflatten(-1, (self.num_heads, -1)), out)

    def _expanded(
        self,
        q: torch.Tensor,
        absorbed: torch.Tensor,
        entries: torch.Tensor,
        batch: ForwardBatch,
        metadata: SiteMetadata,
        out: torch.Tensor,
    ) -> None:
        """Computes expanded attention for a step's prompts, and absorbed attention for its decoding rows `absorbed`."""
        if len(absorbed):
            attended = absorbed.new_empty((*absorbed.shape[:2], self.spec.kv_lora_rank))
            decode = metadata.sparse if metadata.decode is None else metadata.decode
            assert decode is not None
            decode.attend(absorbed, self.attention, attended)
            self.per_head(attended, self.w_uv, out[: len(absorbed)])
        assert batch.extend is not None and metadata.latent_chunks is not None
        attend = metadata.latent_prompt or self.attend_expanded
        attend(
            q,
            entries,
            self.w_uk,
            self.w_uv,
            out,
            batch.extend.start_loc,
            self.cache.k,
            metadata.latent_chunks,
            scale=self.spec.softmax_scale,
            cache_scale=self.cache.k_scale,
            record=self.record,
            window=self.spec.window,
            **({} if self.attention.sinks is None else {"sinks": self.attention.sinks}),
        )
