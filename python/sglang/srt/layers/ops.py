"""The ops that layers call, each with its torch reference; those of one block are declared beside its reference.

`plan.entry(OP)` returns the chosen kernel with the type of the reference, which defines shapes and meaning. Tests
hold the kernels in `kernels/tables.py` to the parameters of their references.
"""

from __future__ import annotations

from sglang.srt.kernels.op import Op
from sglang.srt.layers import (
    native_adapters,
    native_draft_rows,
    native_ngram,
    native_ops,
    native_sparse_ops,
)
from sglang.srt.layers.quantization import trellis, trellis_banks

DECODE_INPUTS = Op("decode_inputs", native_ops.decode_inputs)
VERIFY_INPUTS = Op("verify_inputs", native_draft_rows.verify_inputs)
DRAFT_INPUTS = Op("draft_inputs", native_draft_rows.draft_inputs)
ACCEPT_DRAFTS = Op("accept_drafts", native_draft_rows.accept_drafts)
NGRAM_DRAFTS = Op("ngram_drafts", native_ngram.ngram_drafts)

EMBEDDING_ROWS = Op("embedding_rows", native_ops.embedding_rows)
RMSNORM = Op("rmsnorm", native_ops.rmsnorm)
FUSED_ADD_RMSNORM = Op("fused_add_rmsnorm", native_ops.fused_add_rmsnorm)
LINEAR = Op("linear", native_ops.linear)
ADD_ADAPTERS = Op("add_adapters", native_adapters.ADAPTERS)
ADD_EXPERT_ADAPTERS = Op("add_expert_adapters", native_adapters.EXPERT_ADAPTERS)
QUANTIZED_LINEAR = Op("linear", native_ops.quantized_linear)
"""The kernels behind the keys linear/<scheme>: they take a weight, and return its product."""
TRELLIS_LINEAR = Op("linear", trellis.trellis_linear)
"""Those behind the key linear/exl3."""

SILU_AND_MUL = Op("silu_and_mul", native_ops.silu_and_mul)
GELU_AND_MUL = Op("gelu_and_mul", native_ops.gelu_and_mul)
RELU2 = Op("relu2", native_ops.relu2)
CLAMPED_SWIGLU = Op("clamped_swiglu", native_ops.gated)
FUSED_MOE = Op("fused_moe", native_ops.fused_moe)
TRELLIS_MOE = Op("fused_moe", trellis_banks.fused_moe)
"""Those of experts in EXL3."""

PREFILL_ATTENTION = Op("prefill_attention", native_ops.context_attention)
PACK_PARTS = Op("pack_parts", native_ops.pack_parts)
MERGE_PARTS = Op("merge_parts", native_ops.merge_parts)

INDEX_NORM_ROPE = Op("index_norm_rope", native_sparse_ops.index_norm_rope)
INDEX_KEY_STORE = Op("index_key_store", native_sparse_ops.index_key_store)
INDEX_QUERIES = Op("index_queries", native_sparse_ops.index_queries)
SPARSE_INDEXER = Op("sparse_indexer", native_sparse_ops.sparse_indexer)
SPARSE_ATTENTION = Op("sparse_attention", native_sparse_ops.attend_selected)
BLOCK_ATTENTION = Op("block_attention", native_sparse_ops.attend_blocks)
