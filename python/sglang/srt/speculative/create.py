"""Creates the drafter that the flags ask for."""

from __future__ import annotations

from sglang.srt.configs.speculative import NGRAM, SpeculativeSettings
from sglang.srt.model_loader.loader import load_draft
from sglang.srt.models.assistant_draft import AssistantDraft
from sglang.srt.models.block_draft import BlockDraft
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.mtp_by_layer import MTPByLayerDraft
from sglang.srt.plan.plan import Plan
from sglang.srt.speculative.autoregressive_draft import AutoregressiveDraft
from sglang.srt.speculative.draft_block import DraftBlock
from sglang.srt.speculative.drafter import Drafter, RemoteDrafter
from sglang.srt.speculative.kv_sharing_assistant import KVSharingAssistant
from sglang.srt.speculative.multi_layer_mtp import MultiLayerMTP
from sglang.srt.speculative.ngram import NgramDrafter


def create_drafter(settings: SpeculativeSettings, model: CausalLM, plan: Plan) -> Drafter:
    """Creates the drafter for a model with loaded weights. Raises UserError for an unsuitable draft checkpoint."""
    num_tokens = settings.num_draft_tokens
    if not plan.description.last_stage:
        return RemoteDrafter(num_tokens, settings.lookahead_slots, plan.next_tokens_read)
    if settings.algorithm != NGRAM:
        draft = load_draft(plan, model)
        if isinstance(draft, BlockDraft):
            return DraftBlock(draft, num_tokens, plan.max_running_requests)
        if isinstance(draft, AssistantDraft):
            return KVSharingAssistant(draft, num_tokens)
        if isinstance(draft, MTPByLayerDraft):
            return MultiLayerMTP(draft, num_tokens, plan.max_running_requests, plan.device)
        return AutoregressiveDraft(
            draft, num_tokens, plan.draft is not None and plan.draft.description.shares_selection
        )
    return NgramDrafter(
        plan.entry("ngram_drafts"),
        settings.ngram,
        num_tokens,
        plan.max_running_requests,
        plan.context_len,
        plan.device,
    )
