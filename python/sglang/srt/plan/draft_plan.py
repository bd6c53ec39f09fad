"""A rank's part of a draft, and what it adds to the target's plan: needs, caches, attention sites, bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative import DSPARK, STANDALONE, SpeculativeSettings
from sglang.srt.drafts.config import DraftConfig, read_draft_config
from sglang.srt.drafts.registry import describe_draft
from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.kernels.spec import Choice, Need
from sglang.srt.plan.host_tables import host_table_bytes
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.memory import FixedMemory, activation_bytes, draft_graph_bytes, rotary_bytes
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.needs import needs_of
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.speculation import speculative_settings
from sglang.srt.plan.weights import front_bytes, rank_weight_bytes
from sglang.srt.server_args import ServerArgs

OF_DRAFT = "draft"
"""Variant of an op whose kernel for the draft differs from the target's."""
T = TypeVar("T")
_LOGITS_COPIES = 3  # of the head's own rows, of the target's vocabulary, and for sampling


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The plan of a draft on one rank of the target's last stage."""

    config: DraftConfig
    description: DraftDescription
    weights: RankWeights

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
        if not draft.form.separate:
            rows = 0 if draft.model.embedding.on_host else self._embedding_rows
            embeddings = rows if draft.own_embedding else copies
            total += front_bytes(of_rank, dtype, embeddings, head=draft.head_size > 0)
        return total

    @property
    def _embedding_rows(self) -> int:
        """Returns the rank's rows of the draft's own embedding."""
        if self.description.form.separate:
            return self.weights.head.rows
        return -(-self.description.vocab_size // self.weights.ranks.tp_size)

    def host_bytes(self, dtype: str) -> int:
        """Returns the bytes of the draft's own embedding in main memory, for each rank."""
        model = self.description.model
        return self._embedding_rows * model.hidden_size * KV_DTYPE_BYTES[dtype] if model.embedding.on_host else 0

    def describe(self) -> dict[str, Any]:
        """Describes the draft for /server_info."""
        draft = self.description
        return {
            "kind": draft.kind,
            "model_path": self.config.model_path,
            "architecture": draft.model.architecture,
            "layers": len(draft.model.layers),
            "aux_layers": list(draft.aux_layers),
            "vocabulary": draft.head_size or draft.vocab_size,
            "weights": sorted({quant.scheme if quant else "16 bits" for _, quant in self.weights.matrices()}),
        }

    def own_choices(self, by_key: Mapping[str, T]) -> dict[str, T]:
        """Returns the plan's choices as the draft's layers look them up: where the draft has its own for an op, that
        replaces the target's."""
        draft_choices = {
            key.removesuffix(f"/{OF_DRAFT}"): value for key, value in by_key.items() if key.endswith(f"/{OF_DRAFT}")
        }
        return {**by_key, **draft_choices}


def plan_draft(config: DraftConfig, description: DraftDescription, ranks: RankLayout) -> DraftPlan:
    """Plans the rank's share of the draft. Raises UserError for a draft that the ranks cannot share."""
    layout = layout_of_draft(ranks, description)
    check_layout(description.model, layout)
    of_rank = rank_weights(description.model, layout)
    if not description.form.separate:
        of_rank = replace(of_rank, front=description.front())
    return DraftPlan(config, description, of_rank)


def layout_of_draft(ranks: RankLayout, draft: DraftDescription) -> RankLayout:
    """Returns the layout of the ranks that share the draft: of the last stage, or, where attention groups have requests
    of their own, of one group, so that a group drafts without the others."""
    if ranks.attn_dp_size > 1:
        return RankLayout(ranks.attn_tp_size)
    return replace(ranks, pp_size=1, dcp_size=1, ep_size=ranks.ep_size if draft.model.experts else 1)


def _parallel_of_draft(parallel: ParallelConfig, draft: DraftPlan) -> ParallelConfig:
    ranks = parallel.ranks
    if ranks.attn_dp_size == 1:
        return replace(parallel, ranks=replace(ranks, pp_size=1))
    return replace(parallel, ranks=RankLayout(draft.weights.ranks.tp_size, dcp_size=ranks.dcp_size))


def with_draft_layers(target: ModelDescription, draft: DraftPlan | None) -> ModelDescription:
    """Returns the target with the draft's layers behind its own, as caches and attention see them."""
    if draft is None:
        return target
    return replace(target, layers=(*target.layers, *draft.description.model.layers))


def tables_on_host(target: ModelDescription, draft: DraftPlan | None, parallel: ParallelConfig) -> int:
    """Returns the bytes of tables in main memory, of the target and of its draft, for each rank that has them."""
    return host_table_bytes(target, parallel) + (0 if draft is None else draft.host_bytes(parallel.dtype))


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
        yield replace(need, variant=need.variant or OF_DRAFT)
    else:
        yield replace(same_dims[0], traits=same_dims[0].traits | need.traits)


def asked_draft(
    args: ServerArgs, model: ModelConfig, target: ModelDescription, apart: str
) -> tuple[DraftConfig, DraftDescription] | None:
    """Returns the draft that the flags ask for; None: there is none, or none with weights. `apart`: `keep_shared_apart`
    of `describe_model`. Raises UserError for a draft that is missing, malformed, not computed here or made for another
    model."""
    settings = speculative_settings(args, model.architecture)
    config = None if settings is None else read_draft_config(settings, model, args.download_dir)
    if settings is None or config is None:
        return None
    if target.transformers_class is not None and settings.algorithm != STANDALONE:
        raise UserError(
            f"--speculative-algorithm {args.speculative_algorithm} reads hidden states of layers, which a class of"
            " transformers keeps to itself; NGRAM and STANDALONE can draft."
        )
    config = replace(config, keep_shared_apart=apart)
    draft = describe_draft(config, target)
    _check_depth(settings)
    return config, draft


def _check_depth(settings: SpeculativeSettings) -> None:
    """Raises UserError if more draft tokens are asked for than the rows of a trained block make."""
    if not settings.block_size or settings.num_steps <= settings.block_draft_tokens:
        return
    if settings.algorithm == DSPARK:
        raise UserError(
            f"the draft was trained for blocks of {settings.block_draft_tokens} draft tokens, of which"
            f" {settings.num_steps} cannot be asked: deeper blocks spoil the draft tokens at every place. Pass"
            f" --speculative-dspark-block-size {settings.block_draft_tokens} or fewer."
        )
    raise UserError(
        f"the draft was trained for blocks of {settings.block_size} tokens, of which {settings.num_draft_tokens}"
        f" cannot be asked; pass --speculative-num-draft-tokens {settings.block_draft_tokens + 1} or fewer."
    )


def check_backends(choices: Mapping[str, Choice], draft: DraftDescription | None) -> None:
    """Raises UserError where the target's and the draft's heads would need two attention backends, or the backend
    supports only one shape of heads, or no blocks."""
    if draft is None:
        return
    for op in ("decode_attention", "extend_attention"):
        chosen = [choice for key, choice in choices.items() if key.partition("/")[0] == op]
        entries = {choice.spec.entry for choice in chosen}
        if draft.form.rows_a_request > 1 and any(choice.name.startswith("flashinfer") for choice in chosen):
            raise UserError(
                f"{draft.kind} drafts attend as {draft.form.rows_a_request} times as many heads, which flashinfer has"
                " no kernels for; pass --attention-backend triton."
            )
        if len(entries) > 1 or (len(chosen) > 1 and any("flashinfer_mla" in entry for entry in entries)):
            names = " and ".join(sorted({choice.name for choice in chosen}))
            raise UserError(
                f"the heads of the model and of its draft differ, and {names} cannot attend with both; pass"
                " --attention-backend triton, which can."
            )


def with_draft_memory(
    fixed: FixedMemory, draft: DraftPlan, target: ModelDescription, dtype: str, sizes: Sizes
) -> FixedMemory:
    """Returns `fixed` with the draft's buffers. Aux hidden states stay until the draft has read them, side by side. The
    draft's layers run after the target's, so only the larger activations of both count."""
    description, item = draft.description, KV_DTYPE_BYTES[dtype]
    model, ranks = description.model, draft.weights.ranks
    streams = model.layers[0].residual.streams if description.form.reads_streams else 1
    aux = (2 * len(description.aux_layers) + 3) * streams  # features, the embedding beside them, their projection
    rows = sizes.tokens_per_step * aux * target.hidden_size * item
    max_rows = max(sizes.tokens_per_step, sizes.max_running_requests * description.form.rows_a_request)
    draft_activations = activation_bytes(model, dtype, max_rows, ranks)
    logit_rows = max(sizes.max_running_requests, description.form.rows_a_request)
    targets = activation_bytes(target, dtype, sizes.tokens_per_step, sizes.ranks)
    tails = description.form.tails * (sizes.max_running_requests + 1) * target.hidden_size * item
    stages = sizes.ranks.pp_size + 3 if sizes.ranks.pp_size > 1 else 0
    intermediate = stages * sizes.tokens_per_step * len(description.aux_layers) * target.hidden_size * item
    return replace(
        fixed,
        activations=fixed.activations + rows + tails + max(0, draft_activations - targets) + intermediate,
        logits=fixed.logits + logit_rows * description.vocab_size * 4 * _LOGITS_COPIES,
        graphs=fixed.graphs + draft_graph_bytes(len(model.layers), sizes),
        rotary=fixed.rotary + rotary_bytes(model, sizes),
    )
