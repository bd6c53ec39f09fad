"""A rank's part of a draft, and what it adds to the target's plan: needs, caches, attention sites, bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.drafts.ask import RequestedDraft
from sglang.srt.plan.drafts.config import DraftConfig
from sglang.srt.plan.drafts.description import DraftDescription
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weights import front_bytes, rank_weight_bytes

OF_DRAFT = "draft"
"""Variant of an op whose kernel for the draft differs from the target's."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The plan of a draft on one rank of the target's last stage."""

    asked: RequestedDraft
    weights: RankWeights

    @property
    def config(self) -> DraftConfig:
        return self.asked.config

    @property
    def description(self) -> DraftDescription:
        return self.asked.description

    @property
    def num_layers(self) -> int:
        return len(self.description.model.layers)

    def weight_bytes(
        self, dtype: str, fp8_cache: bool = False, features: Collection[str] | None = None, copies: int = 0
    ) -> int:
        """Returns the bytes of weights that the draft adds to the target's, counted as in `rank_weight_bytes`.
        `copies`: rows of the target's embedding that the stage would not have without the draft."""
        total = rank_weight_bytes(self.weights, dtype, fp8_cache, features)
        draft, of_rank = self.description, self.weights
        if not draft.separate:
            rows = -(-draft.vocab_size // of_rank.ranks.tp_size)
            embeddings = rows if draft.own_embedding else copies
            total += front_bytes(of_rank, dtype, embeddings, head=draft.head_size > 0)
        return total

    def describe(self) -> dict[str, Any]:
        """Describes the draft for /server_info."""
        return self.asked.describe(
            sorted({quant.scheme if quant else "16 bits" for _, quant in self.weights.matrices()})
        )

    def own_choices(self, by_key: Mapping[str, T]) -> dict[str, T]:
        """Returns the plan's choices as the draft's layers look them up: where the draft has its own for an op, that
        replaces the target's."""
        draft_choices = {
            key.removesuffix(f"/{OF_DRAFT}"): value for key, value in by_key.items() if key.endswith(f"/{OF_DRAFT}")
        }
        return {**by_key, **draft_choices}


def plan_draft(asked: RequestedDraft, ranks: RankLayout) -> DraftPlan:
    """Plans the rank's share of the draft. Raises UserError for a draft that the ranks cannot share."""
    description = asked.description
    layout = layout_of_draft(ranks, description)
    check_layout(description.model, layout)
    of_rank = rank_weights(description.model, layout)
    if not description.separate:
        of_rank = replace(of_rank, front=description.front())
    return DraftPlan(asked, of_rank)


def layout_of_draft(ranks: RankLayout, draft: DraftDescription) -> RankLayout:
    """Returns the layout of the ranks that share the draft: of the last stage, or, where attention groups have requests
    of their own, of one group, so that a group drafts without the others."""
    if ranks.attn_dp_size > 1:
        return RankLayout(ranks.attn_tp_size)
    return replace(ranks, pp_size=1, dcp_size=1, ep_size=ranks.ep_size if draft.model.experts else 1)


def _parallel_of_draft(parallel: ParallelConfig, draft: DraftPlan) -> ParallelConfig:
    if parallel.attn_dp_size == 1:
        return replace(parallel, pp_size=1)
    ranks = draft.weights.ranks
    return replace(parallel, tp_size=ranks.tp_size, ep_size=1, pp_size=1, attn_dp_size=1, dp_lm_head=False)


def with_draft_layers(target: ModelDescription, draft: DraftPlan | None) -> ModelDescription:
    """Returns the target with the draft's layers behind its own, as caches and attention see them."""
    if draft is None:
        return target
    return replace(target, layers=(*target.layers, *draft.description.model.layers))


def needs_with_draft(of_rank: RankWeights, draft: DraftPlan | None, parallel: ParallelConfig) -> tuple[Need, ...]:
    """Returns the needs of the target and its draft, each once. The target's kernel serves the draft, too, where both
    need an op for heads of equal dims; experts that are stored or shaped differently have a kernel of their own."""
    needs = {need.key: need for need in needs_of(of_rank, parallel)}
    if draft is None:
        return tuple(needs.values())
    norms = Need("fused_add_rmsnorm", q_dtype=parallel.dtype)  # a draft norms what it reads, whatever its residual is
    for need in (*needs_of(draft.weights, _parallel_of_draft(parallel, draft)), norms):
        for merged in _merged(needs, need):
            needs[merged.key] = merged
    return tuple(needs.values())


def _merged(needs: Mapping[str, Need], need: Need) -> Iterator[Need]:
    """Yields the needs that the draft's need adds or replaces."""
    same_op = [other for other in needs.values() if other.op == need.op and other.key.startswith(need.op)]
    if need.op == "linear":
        same = needs.get(need.key)
        yield replace(need, shapes=tuple(sorted({*need.shapes, *(same.shapes if same else ())})))
        return
    same_dims = [other for other in same_op if (other.head_dim, other.v_head_dim) == (need.head_dim, need.v_head_dim)]
    if not same_op:
        yield replace(need, variant="")
    elif not same_dims:
        yield replace(need, variant=f"{need.head_dim}x{need.v_head_dim}")
    elif need.op == "fused_moe" and need not in same_dims:
        yield replace(need, variant=OF_DRAFT)
    else:
        yield replace(same_dims[0], traits=same_dims[0].traits | need.traits)
