"""Protocols of the ops that layers call, one per op; every kernel of the op in `kernels/tables.py` follows it.

`plan.entry(op)` returns the chosen kernel's callable, and the call site annotates its protocol. Tests check that the
kernels have these parameters and that call sites are annotated. Each docstring names the torch reference that defines
shapes and meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.configs.activation import Activation

if TYPE_CHECKING:
    from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
    from sglang.srt.hardware.arch import ArchTraits
    from sglang.srt.kernels.tile_configs import TileConfigs
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.layers.attention.selection import EntryRows, Selection
    from sglang.srt.layers.moe.expert_weights import ExpertWeights
    from sglang.srt.layers.native_draft_rows import AcceptedDrafts, DraftInputs, VerifyInputs
    from sglang.srt.layers.quantization.activations import Activations
    from sglang.srt.layers.quantization.linear_weight import LinearWeight
    from sglang.srt.plan.plan import Plan

LSE_BYTES = 16
"""Bytes behind the columns of a `pack_parts` row that hold the log-sum-exp; 16 keep rows aligned."""
Routing = tuple[torch.Tensor, torch.Tensor]
"""Weights [T, k] fp32 and expert ids [T, k] int32."""


class DecodeInputsOp(Protocol):
    """Signature of `native_ops.decode_inputs`."""

    def __call__(
        self,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        next_tokens: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class VerifyInputsOp(Protocol):
    """Signature of `native_draft_rows.verify_inputs`."""

    def __call__(
        self,
        slots: torch.Tensor,
        widths: torch.Tensor,
        lens: torch.Tensor,
        next_tokens: torch.Tensor,
        req_to_token: torch.Tensor,
        width: int,
    ) -> VerifyInputs: ...


class DraftInputsOp(Protocol):
    """Signature of `native_draft_rows.draft_inputs`."""

    def __call__(
        self, slots: torch.Tensor, first: torch.Tensor, ends: torch.Tensor, req_to_token: torch.Tensor, width: int
    ) -> DraftInputs: ...


class AcceptDraftsOp(Protocol):
    """Signature of `native_draft_rows.accept_drafts`."""

    def __call__(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        widths: torch.Tensor,
        next_tokens: torch.Tensor,
        lens: torch.Tensor,
        forced: torch.Tensor | None = None,
    ) -> AcceptedDrafts: ...


class NgramDraftsOp(Protocol):
    """Signature of `native_ngram.ngram_drafts`."""

    def __call__(
        self,
        history: torch.Tensor,
        slots: torch.Tensor,
        lens: torch.Tensor,
        tokens: torch.Tensor,
        longest: int,
        num_speculative_tokens: int,
        corpus: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor: ...


class EmbeddingRowsOp(Protocol):
    """Signature of `native_ops.embedding_rows`."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor: ...


class RMSNormOp(Protocol):
    """Signature of `native_ops.rmsnorm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class AddRMSNormOp(Protocol):
    """Signature of `native_ops.fused_add_rmsnorm`."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GateOp(Protocol):
    """Signature of `native_ops.silu_and_mul`, `gelu_and_mul` and `relu2`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class ClampedGateOp(Protocol):
    """Signature of `native_ops.gated`."""

    def __call__(self, x: torch.Tensor, activation: Activation) -> torch.Tensor: ...


class LinearOp(Protocol):
    """Signature of `native_ops.linear`."""

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor: ...


class QuantizedProduct(Protocol):
    """Multiplies x [..., K] with a quantized weight, plus bias [N]; returns [..., N] in x's dtype or `out_dtype`."""

    def __call__(
        self, x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


class QuantizedLinearOp(Protocol):
    """Signature of `native_ops.quantized_linear`, which prepares the product with one weight."""

    def __call__(self, weight: LinearWeight, arch: ArchTraits, configs: TileConfigs) -> QuantizedProduct: ...


class GatedRMSNormOp(Protocol):
    """Signature of `recurrent.native.gated_rmsnorm`."""

    def __call__(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gate_first: bool = False,
        sigmoid: bool = False,
    ) -> torch.Tensor: ...


class OutputGateOp(Protocol):
    """Signature of `recurrent.native.attention_output_gate`."""

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor: ...


class HeadGateOp(Protocol):
    """Signature of `recurrent.native.attention_head_gate`."""

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor: ...


class LatentStoreOp(Protocol):
    """Signature of `native_ops.latent_norm_rope_store`."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        absorbed: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        out_cache_loc: torch.Tensor,
        scale: float = 1.0,
        is_neox_style: bool = True,
    ) -> torch.Tensor: ...


class PackPartsOp(Protocol):
    """Signature of `native_ops.pack_parts`."""

    def __call__(self, parts: torch.Tensor, lse: torch.Tensor, ranks: int) -> torch.Tensor: ...


class MergePartsOp(Protocol):
    """Signature of `native_ops.merge_parts`."""

    def __call__(self, received: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None: ...


class LatentAbsorbOp(Protocol):
    """Signature of `native_ops.latent_absorb`."""

    def __call__(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor: ...


class LatentPromptOp(Protocol):
    """Signature of `native_ops.expanded_latent_attention`."""

    def __call__(
        self,
        q: torch.Tensor,
        entries: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        out: torch.Tensor,
        start_loc: torch.Tensor,
        cache: torch.Tensor,
        chunks: Sequence[LatentChunk],
        *,
        scale: float,
        cache_scale: float = 1.0,
    ) -> None: ...


class LatentPromptFactory(Protocol):
    """Creates a `LatentPromptOp` for a plan."""

    def __call__(self, plan: Plan) -> LatentPromptOp: ...


class LatentPackStoreOp(Protocol):
    """Signature of `native_sparse_ops.latent_pack_store`."""

    def __call__(self, entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None: ...


class IndexNormRopeOp(Protocol):
    """Signature of `native_sparse_ops.index_norm_rope`."""

    def __call__(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor | None,
        first_query: int,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        is_neox_style: bool = True,
    ) -> torch.Tensor: ...


class IndexKeyStoreOp(Protocol):
    """Signature of `native_sparse_ops.index_key_store`."""

    def __call__(
        self, keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, out_cache_loc: torch.Tensor
    ) -> None: ...


class IndexQueriesOp(Protocol):
    """Signature of `native_sparse_ops.index_queries`."""

    def __call__(
        self, q: torch.Tensor, weights: torch.Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SparseIndexerOp(Protocol):
    """Selects the `top_k` entries with the largest `native_sparse_ops.index_logits` for each token."""

    def __call__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        rows: EntryRows,
        top_k: int,
    ) -> Selection: ...


class SparseIndexerFactory(Protocol):
    """Creates a `SparseIndexerOp` for a plan."""

    def __call__(self, plan: Plan) -> SparseIndexerOp: ...


class SparseAttentionOp(Protocol):
    """Signature of `native_sparse_ops.attend_selected`."""

    def __call__(
        self,
        q: torch.Tensor,
        sources: Sequence[tuple[torch.Tensor, Selection]],
        out: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None: ...


class SparseAttentionFactory(Protocol):
    """Creates a `SparseAttentionOp` for a plan."""

    def __call__(self, plan: Plan) -> SparseAttentionOp: ...


class SelectedBlockOp(Protocol):
    """Signature of `pooled_sparse.reference.attend_blocks`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        selection: BlockSelection,
        out: torch.Tensor,
        *,
        scale: float,
    ) -> None: ...


class SelectedBlockFactory(Protocol):
    """Creates a `SelectedBlockOp` for a plan."""

    def __call__(self, plan: Plan) -> SelectedBlockOp: ...


class BlockIndexerOp(Protocol):
    """Selects the blocks with the largest `native_block_groups.block_scores` for each token and head."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        rows: EntryRows,
        blocks: EntryRows,
        top_blocks: int,
        local_blocks: int,
    ) -> Selection: ...


class BlockIndexerFactory(Protocol):
    """Creates a `BlockIndexerOp` for a plan."""

    def __call__(self, plan: Plan) -> BlockIndexerOp: ...


class BlockAttentionOp(Protocol):
    """Signature of `native_block_groups.attend_blocks`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        selection: Selection,
        lens: torch.Tensor,
        block: int,
        out: torch.Tensor,
        *,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None: ...


class BlockAttentionFactory(Protocol):
    """Creates a `BlockAttentionOp` for a plan."""

    def __call__(self, plan: Plan) -> BlockAttentionOp: ...


class SharedKVStoreOp(Protocol):
    """Signature of `compressed.reference.shared_kv_norm_rope_store`."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor: ...


class TailRotationOp(Protocol):
    """Signature of `compressed.reference.tail_rotation`."""

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False
    ) -> torch.Tensor: ...


class HyperConnectionOp(Protocol):
    """Signature of `hyper_connections.reference.hyper_connection`."""

    def __call__(
        self,
        streams: torch.Tensor,
        out: torch.Tensor | None,
        placement: torch.Tensor | None,
        matrix: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        mix_eps: float,
        rounds: int,
        lagged: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class QKNormRopeStoreOp(Protocol):
    """Signature of `native_ops.qk_norm_rope_store`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        out_cache_loc: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        is_neox_style: bool = True,
        k_group_scales: torch.Tensor | None = None,
        v_group_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class QNormRopeOp(Protocol):
    """Signature of `native_ops.q_norm_rope`."""

    def __call__(
        self, q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class ValueNormOp(Protocol):
    """Signature of `native_ops.value_norm`."""

    def __call__(
        self, qkv: torch.Tensor, num_kv_heads: int, head_dim: int, eps: float, from_keys: bool = False
    ) -> torch.Tensor: ...


class QKWholeNormOp(Protocol):
    """Signature of `native_ops.qk_whole_norm`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        totals: tuple[int, int],
        k_copies: int = 1,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None: ...


class SoftmaxRoutingOp(Protocol):
    """Signature of `native_ops.topk_softmax`."""

    def __call__(
        self,
        router_logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        scale: float = 1.0,
        with_shared: bool = False,
        num_valid: torch.Tensor | None = None,
        groups: tuple[int, int] = (1, 1),
        expert_map: torch.Tensor | None = None,
    ) -> Routing: ...


@dataclass(frozen=True, slots=True)
class ImageCorrection:
    """Score corrections of image tokens that replace the router's bias: `bias` [E] fp32 applies to the step's
    `token_ids` [T] int64 that equal `token`."""

    bias: torch.Tensor
    token_ids: torch.Tensor
    token: int


class ScoreRoutingOp(Protocol):
    """Signature of `native_ops.topk_sigmoid` and `topk_sqrtsoftplus`."""

    def __call__(
        self,
        router_logits: torch.Tensor,
        bias: torch.Tensor | None,
        top_k: int,
        renormalize: bool,
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
        with_shared: bool = False,
        num_valid: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        of_images: ImageCorrection | None = None,
    ) -> Routing: ...


class HashRoutingOp(Protocol):
    """Signature of `native_ops.topk_hash`."""

    def __call__(
        self,
        router_logits: torch.Tensor,
        token_ids: torch.Tensor,
        table: torch.Tensor,
        score: str,
        scale: float = 1.0,
        with_shared: bool = False,
        num_valid: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> Routing: ...


class FusedMoEOp(Protocol):
    """Signature of `native_ops.fused_moe`."""

    def __call__(
        self,
        x: Activations,
        w13: ExpertWeights,
        w2: ExpertWeights,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Activation,
        configs: TileConfigs,
        features: Collection[str] = (),
    ) -> torch.Tensor: ...


OPS: Mapping[str, type] = {
    "decode_inputs": DecodeInputsOp,
    "verify_inputs": VerifyInputsOp,
    "draft_inputs": DraftInputsOp,
    "accept_drafts": AcceptDraftsOp,
    "ngram_drafts": NgramDraftsOp,
    "embedding_rows": EmbeddingRowsOp,
    "rmsnorm": RMSNormOp,
    "fused_add_rmsnorm": AddRMSNormOp,
    "silu_and_mul": GateOp,
    "gelu_and_mul": GateOp,
    "relu2": GateOp,
    "clamped_swiglu": ClampedGateOp,
    "linear": LinearOp,
    "gated_rmsnorm": GatedRMSNormOp,
    "attention_output_gate": OutputGateOp,
    "attention_head_gate": HeadGateOp,
    "latent_norm_rope_store": LatentStoreOp,
    "pack_parts": PackPartsOp,
    "merge_parts": MergePartsOp,
    "latent_absorb": LatentAbsorbOp,
    "latent_prompt_attention": LatentPromptFactory,
    "latent_pack_store": LatentPackStoreOp,
    "index_norm_rope": IndexNormRopeOp,
    "index_key_store": IndexKeyStoreOp,
    "index_queries": IndexQueriesOp,
    "sparse_indexer": SparseIndexerFactory,
    "sparse_attention": SparseAttentionFactory,
    "block_indexer": BlockIndexerFactory,
    "block_attention": BlockAttentionFactory,
    "selected_block_attention": SelectedBlockFactory,
    "shared_kv_norm_rope_store": SharedKVStoreOp,
    "tail_rotation": TailRotationOp,
    "hyper_connection": HyperConnectionOp,
    "qk_norm_rope_store": QKNormRopeStoreOp,
    "qk_whole_norm": QKWholeNormOp,
    "q_norm_rope": QNormRopeOp,
    "value_norm": ValueNormOp,
    "topk_softmax": SoftmaxRoutingOp,
    "topk_sigmoid": ScoreRoutingOp,
    "topk_sqrtsoftplus": ScoreRoutingOp,
    "topk_hash": HashRoutingOp,
    "fused_moe": FusedMoEOp,
}
"""Protocols by the op's name in the tables, without attention backends and ops whose protocol is beside their
kernels."""
