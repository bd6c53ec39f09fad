"""Creates the drafter that the flags ask for."""

from __future__ import annotations

from sglang.srt.configs.speculative import NGRAM, SpeculativeSettings
from sglang.srt.model_loader.loader import load_draft
from sglang.srt.models.block_draft import BlockDraft
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.depth_draft import DepthDraft
from sglang.srt.models.frozen_draft import FrozenDraft
from sglang.srt.plan.plan import Plan
from sglang.srt.speculative.draft_block import DraftBlock
from sglang.srt.speculative.draft_chain import DraftChain
from sglang.srt.speculative.draft_depths import DraftDepths
from sglang.srt.speculative.draft_frozen import DraftFrozen
from sglang.srt.speculative.drafter import Drafter, DrafterElsewhere
from sglang.srt.speculative.ngram import NgramDrafter


def create_drafter(settings: SpeculativeSettings, model: CausalLM, plan: Plan) -> Drafter:
    """Creates the drafter for a model with its weights. Raises UserError for a draft whose checkpoint is not as it
    should be."""
    num_tokens = settings.num_draft_tokens
    if not plan.description.last_stage:
        return DrafterElsewhere(num_tokens, settings.tokens_ahead, plan.next_tokens_read)
    if settings.algorithm != NGRAM:
        draft = load_draft(plan, model)
        if isinstance(draft, BlockDraft):
            return DraftBlock(draft, num_tokens, plan.max_running_requests)
        if isinstance(draft, FrozenDraft):
            return DraftFrozen(draft, num_tokens)
        if isinstance(draft, DepthDraft):
            return DraftDepths(draft, num_tokens, plan.max_running_requests, plan.device)
        return DraftChain(draft, num_tokens, plan.draft is not None and plan.draft.description.shares_selection)
    return NgramDrafter(
        plan.entry("ngram_guesses"),
        settings.ngram,
        num_tokens,
        plan.max_running_requests,
        plan.context_len,
        plan.device,
    )
