"""Computes a draft that is a complete model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.distributed import parallel_state
from sglang.srt.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.model_loader.loader import Loadable
    from sglang.srt.plan.plan import Plan


class StandaloneDraft:
    """A draft that is a complete model of its own. Implements DraftModel."""

    shifted = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        assert plan.draft is not None
        groups = parallel_state.groups().draft_groups
        self.model = CausalLM(plan.for_draft, target.device, plan.draft.description.first_layer, groups)
        self.caches, self.vocab_size = self.model.caches, plan.draft.description.vocab_size
        self.model_path = plan.draft.config.model_path
        self.last_token = self.model.description.vocab_size - 1

    def loadables(self) -> list[tuple[Loadable, str]]:
        return [(self.model, self.model_path)]

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> None:
        return None

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        # Token ids beyond the draft's vocabulary are special ones that do not occur in texts.
        known = replace(
            batch, input_ids=batch.input_ids.clamp(max=self.last_token), embedding_rows=None, mrope_positions=None
        )
        return self.model.compute(known, None)

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(state)[:, : self.vocab_size]
        missing = self.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
