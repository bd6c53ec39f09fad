"""Computes the memory, in bytes, that a draft takes on a rank besides its weights and caches."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.drafts.draft_plan import DraftPlan
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.memory import (
    FixedMemory,
    activation_bytes,
    draft_graph_bytes,
    rotary_bytes,
)
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.sizes import Sizes

_LOGITS_COPIES = 3  # of the head's own rows, of the target's vocabulary, and for sampling


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
    max_rows = max(sizes.tokens_per_step, sizes.max_running_requests * description.rows_a_request)
    draft_activations = activation_bytes(model, dtype, max_rows, ranks)
    logit_rows = max(sizes.max_running_requests, description.rows_a_request)
    targets = activation_bytes(target, dtype, sizes.tokens_per_step, sizes.ranks)
    tails = description.tails * (sizes.max_running_requests + 1) * target.hidden_size * item
    stages = sizes.ranks.pp_size + 3 if sizes.ranks.pp_size > 1 else 0
    intermediate = stages * sizes.tokens_per_step * len(description.aux_layers) * target.hidden_size * item
    return replace(
        fixed,
        activations=fixed.activations + rows + tails + max(0, draft_activations - targets) + intermediate,
        logits=fixed.logits + logit_rows * description.vocab_size * 4 * _LOGITS_COPIES,
        graphs=fixed.graphs + draft_graph_bytes(len(model.layers), draft.asked.num_tokens, sizes),
        rotary=fixed.rotary + rotary_bytes(model, sizes),
    )
