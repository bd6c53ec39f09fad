"""Draft models, which compute a chain of draft tokens after every step of their target.

A draft has layers of its own, whose caches use the target's pages. It shares the target's embedding and usually its
output head. Its rows are those of a step of the target, or one row per request:

    features = draft.features(hidden, captured)     what the first draft step reads of the target's rows
    state = draft(batch, features)                  [T, H'] the features of the next draft step
    draft.logits(state[rows])                       [R, V] of the target's vocabulary

A `shifted` draft computes row i from the token after row i and from row i's features, with keys and values at position
i; others compute row i from token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from sglang.srt.drafts.form import Form
from sglang.srt.drafts.parts import DraftParts

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore
    from sglang.srt.model_loader.loader import Loadable
    from sglang.srt.models.causal_lm import CausalLM
    from sglang.srt.plan.plan import Plan


F = TypeVar("F", bound=Form)


class LoadedDraft(Protocol):
    """What every draft with weights has."""

    aux_layers: tuple[int, ...]
    """Target layers whose outputs the draft reads."""
    caches: list[CacheStore]
    """Caches of its layers, whose memory the pools provide."""

    def loadables(self) -> list[tuple[Loadable, str]]:
        """Returns the parts that checkpoints fill, each with its directory."""

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns features [T, H'] from the target's final hidden states [T, H] and the aux hidden states [T, H], or
        [T, N * H] of N streams, in the order of `aux_layers`; None if the draft reads only tokens."""


class DraftModel(LoadedDraft, Protocol):
    """A draft model as described in the module. Everything may be captured in a CUDA graph."""

    shifted: bool

    def __call__(self, batch: ForwardBatch, features: torch.Tensor | None) -> torch.Tensor:
        """Returns the features [T, H'] of the next draft step. `batch.input_ids` [T] are the draft's. Overwrites
        `features`."""

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] fp32 of state [R, H'] on every rank; -inf for tokens that the draft does not know."""


class PartsDraft(Generic[F]):
    """A draft made of the parts in `drafts.parts`. Implements LoadedDraft; its features are the target's final hidden
    states unless a class says otherwise."""

    shifted = True

    def __init__(self, plan: Plan, target: CausalLM) -> None:
        """Builds the planned draft as a part of the target's last stage, without weights."""
        self.parts = parts = DraftParts(plan, target)
        self.aux_layers, self.caches = parts.draft.aux_layers, parts.caches
        form: Any = parts.draft.form
        self.form: F = form

    def loadables(self) -> list[tuple[Loadable, str]]:
        return self.parts.loadables()

    def features(self, hidden: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        return hidden

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.parts.head(state)
