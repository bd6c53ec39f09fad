"""Creates the drafter that the flags ask for, with the weights of its draft."""

from __future__ import annotations

import logging
import time
from pkgutil import resolve_name
from typing import Any

import torch

from sglang.srt.configs.speculative import SpeculativeSettings
from sglang.srt.drafts.drafter import Drafter, RemoteDrafter
from sglang.srt.drafts.ngram.drafter import NgramDrafter
from sglang.srt.model_loader.loader import fill_random, load_checkpoint
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.plan import Plan

logger = logging.getLogger(__name__)


def create_drafter(settings: SpeculativeSettings, model: CausalLM, plan: Plan) -> Drafter:
    """Creates the drafter for a model with loaded weights. Raises UserError for an unsuitable draft checkpoint."""
    if not plan.description.last_stage:
        return RemoteDrafter(settings.num_draft_tokens, settings.lookahead_slots, plan.next_tokens_read)
    if plan.draft is None:
        return NgramDrafter(plan, settings.ngram)
    draft, description = filled_draft(plan, model), plan.draft.description
    if description.model.quantization is not None:
        for loadable, _ in draft.loadables():
            loadable.params.clear()  # kernels have rearranged copies
    drafter: Drafter = resolve_name(description.form.proposed_by)(draft, plan)
    return drafter


def filled_draft(plan: Plan, target: CausalLM) -> Any:
    """Builds the planned draft (a `drafts.model.LoadedDraft`) with its weights. Those of MTP layers are in the target's
    checkpoint, of which nothing is read twice. Called by the ranks of the last stage. Raises UserError if a checkpoint
    does not hold exactly the weights of the draft, or holds NaN or infinity."""
    assert plan.draft is not None
    start, num_bytes = time.perf_counter(), 0
    with torch.inference_mode():
        draft = resolve_name(plan.draft.description.form.computed_by)(plan, target)
        for loadable, path in draft.loadables():
            if plan.draft.config.dummy:
                fill_random(loadable.params, seed=0)
            else:
                load_checkpoint(loadable, path, getattr(torch, plan.dtype))
            for step in loadable.finish:
                step()
            num_bytes += sum(p.tensor.nbytes for p in loadable.params.values())
    seconds = time.perf_counter() - start
    logger.info("Loaded the draft, %s: %.2f GB of weights in %.1f s", plan.draft.description, num_bytes / 1e9, seconds)
    return draft
