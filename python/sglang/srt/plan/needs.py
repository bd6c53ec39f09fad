"""From a model's facts to the ops that it needs, each once."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.model_facts import ModelFacts


def needs_of(facts: ModelFacts, dtype: str, kv_dtype: str, page_size: int, tp_size: int) -> tuple[Need, ...]:
    """In the order of a layer. One attention need covers all layers: its traits are those of any of them."""
    return (
        Need("rmsnorm", q_dtype=dtype),
        Need("fused_add_rmsnorm", q_dtype=dtype),
        Need("linear", q_dtype=dtype),
        *(Need("linear", q_dtype=dtype, quant=scheme) for scheme in facts.linear_quants),
        *_attention(facts, dtype, kv_dtype, page_size),
        *_feed_forward(facts, dtype),
        *([Need("all_reduce", q_dtype=dtype)] if tp_size > 1 else []),
    )


def _attention(facts: ModelFacts, dtype: str, kv_dtype: str, page_size: int) -> Iterator[Need]:
    def attend(op: str, dims: tuple[int, int], traits: frozenset[str]) -> Need:
        return Need(op, dims[0], dims[1], dtype, kv_dtype, page_size, traits=traits)

    dims = (facts.head_dim, facts.v_head_dim)
    yield Need("qk_norm_rope_store", q_dtype=dtype, kv_dtype=kv_dtype)
    yield attend("extend_attention", dims, facts.attention_traits)
    yield attend("decode_attention", dims, facts.attention_traits)
    if facts.sparse_index:
        yield Need("sparse_indexer", q_dtype=dtype)
    if facts.linear_attention:
        yield Need("gated_delta_rule", q_dtype=dtype, traits=frozenset({"hybrid_gdn"}))
    if facts.vision_head_dim:
        yield Need(
            "prefill_attention",
            facts.vision_head_dim,
            facts.vision_head_dim,
            dtype,
            dtype,
            traits=frozenset({"bidirectional"}),
        )


def _feed_forward(facts: ModelFacts, dtype: str) -> Iterator[Need]:
    yield Need("silu_and_mul", q_dtype=dtype)
    if facts.num_experts:
        yield Need(f"topk_{facts.router}", q_dtype=dtype)
        if facts.hash_routed:
            yield Need("topk_hash", q_dtype=dtype)
        yield Need("fused_moe", q_dtype=dtype, quant=facts.expert_quant)
