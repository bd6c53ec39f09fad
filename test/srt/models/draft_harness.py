"""Runs a target with its draft without a server: steps of the target's rows, and chains of draft tokens behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.speculative import SpeculativeSettings
from sglang.srt.drafts.config import read_draft_config
from sglang.srt.drafts.create import filled_draft
from sglang.srt.drafts.registry import describe_draft
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.attention.shared_selection import SharedSelection
from sglang.srt.plan.draft_plan import DraftPlan, plan_draft, with_draft_layers
from sglang.srt.plan.model_description import ModelDescription

from .harness import NativePlan, TinyRunner, plan_for

MAX_DRAFT_TOKENS = 6


@dataclass(frozen=True)
class PlanWithDraft(NativePlan):
    """The torch kernels, for a target and its draft."""

    settings: SpeculativeSettings | None = None

    @functools.cached_property
    def draft(self) -> DraftPlan:
        assert self.settings is not None
        config = read_draft_config(self.settings, self.model)
        assert config is not None
        apart = "--ep-size" if self.ranks.ep_size > 1 else ""
        config = replace(config, keep_shared_apart=apart)
        return plan_draft(config, describe_draft(config, self.description), self.ranks)

    @property
    def everything(self) -> ModelDescription:
        return with_draft_layers(self.description, self.draft)

    @functools.cached_property
    def for_draft(self) -> NativePlan:
        draft = self.draft.description.model
        model = replace(self.model, quantization=draft.quantization)
        view = NativePlan(model, self.context_len, self.device, self.arch, self.kv_cache_dtype, self.ranks)
        view.__dict__.update(description=draft, weights=self.draft.weights)  # in place of what it would compute
        return view


def plan_with_draft(
    target: Path, algorithm: str, draft: Path | None = None, load_format: str = "auto", **args: Any
) -> PlanWithDraft:
    plan = plan_for(target, **args)
    path = None if draft is None else str(draft)
    settings = SpeculativeSettings(algorithm, 4, draft_path=path, draft_load_format=load_format)
    planned = PlanWithDraft(plan.model, kv_cache_dtype=plan.kv_cache_dtype, ranks=plan.ranks, settings=settings)
    draft_of = planned.draft.description
    return replace(planned, aux_layers=draft_of.aux_layers, aux_keeps_streams=draft_of.form.reads_streams)


class DraftRunner(TinyRunner):
    """As TinyRunner, with the draft's rows behind those of the target."""

    shared: SharedSelection | None = None
    """Of the last step, where later passes read what it selected."""

    def __init__(self, plan: PlanWithDraft) -> None:
        super().__init__(plan)
        self.load_draft(plan)

    def load_draft(self, plan: PlanWithDraft) -> None:
        self.shares_selection = plan.draft.description.shares_selection
        with torch.inference_mode():
            self.draft = filled_draft(plan, self.model)  # type: ignore[arg-type]
        self.pools.bind(self.draft.caches)

    @torch.inference_mode()
    def step(
        self, new: Mapping[int, list[int]], following: Mapping[int, int], sampled: list[int] | None = None
    ) -> dict[int, torch.Tensor]:
        """New tokens of each request slot, and the token behind them -> the draft's state behind its last row.
        `sampled`: of rows that are verified, what was sampled at each."""
        batch = self.batch_of_prompts(dict(new))
        hidden = self.model(batch)
        features = self.draft.features(hidden, batch.aux_hidden_states)
        if self.draft.shifted:
            ids = sampled or [token for slot, tokens in new.items() for token in (*tokens[1:], following[slot])]
            batch = replace(batch, input_ids=torch.tensor(ids))
        last = torch.tensor([len(tokens) for tokens in new.values()]).cumsum(0) - 1
        if self.shares_selection:
            self.shared = SharedSelection(last, torch.tensor(list(new)), MAX_DRAFT_TOKENS)
        state = self.draft(replace(batch, step_cache={}, layer_outputs={}, shared_selection=self.shared), features)
        return dict(zip(new, state[last].split(1), strict=True))

    @torch.inference_mode()
    def draft_token(self, slot: int, state: torch.Tensor, following: int, count: int) -> torch.Tensor:
        """Greedy draft tokens behind the token that follows the computed ones -> logits [count, V] that they are drawn
        of. The request's length stays as it was."""
        length, rows, everyones = self.lens[slot], [], self.shared
        self.shared = None if everyones is None else one_request(everyones, slot)
        if not self.draft.shifted:
            state = self._draft_row(slot, following, None)
        for _ in range(count):
            rows.append(self.draft.logits(state))
            state = self._draft_row(slot, int(rows[-1].argmax()), state)
        self.lens[slot], self.shared = length, everyones
        return torch.cat(rows)

    def _draft_row(self, slot: int, token: int, features: torch.Tensor | None) -> torch.Tensor:
        batch = self._batch(True, {slot: [token]})
        return self.draft(replace(batch, shared_selection=self.shared), features)


def one_request(shared: SharedSelection, slot: int) -> SharedSelection:
    """What the request in one slot selected, of those of a step."""
    row = slice(at := shared.slots.tolist().index(slot), at + 1)
    one = SharedSelection(shared.rows[row], shared.slots[row], shared.room)
    for layer, kept in shared.by_layer.items():
        chosen = Selection(kept.chosen.slots[row], kept.chosen.counts[row])
        one.by_layer[layer] = replace(kept, chosen=chosen, since=kept.since[row])
    return one


Reference = Callable[[list[int], int], torch.Tensor]
"""(tokens, how many draft tokens) -> logits [count, V] of greedy draft tokens; the last token is the one sampled
last."""


def check_proposals(
    runner: DraftRunner, reference: Reference, tokens: list[int], atol: float = 1e-4, states: bool = False
) -> None:
    """Prompts in chunks among strangers, rows that are verified and taken back, a prefix that another request computed:
    the same draft tokens as the reference's. `states`: the target has some, which nothing here takes back or shares."""
    close = functools.partial(torch.testing.assert_close, rtol=0.0, atol=atol)
    n = len(tokens)
    strangers = [tokens[i] for i in range(n - 1, 3, -2)]
    first = runner.step({4: tokens[: n // 3], 2: strangers[:-1]}, {4: tokens[n // 3], 2: strangers[-1]})
    close(runner.draft_token(2, first[2], strangers[-1], 3), reference(strangers, 3))
    close(runner.draft_token(4, first[4], tokens[n // 3], 3), reference(tokens[: n // 3 + 1], 3))
    second = runner.step({4: tokens[n // 3 : n - 9]}, {4: tokens[n - 9]})
    want = reference(tokens[: n - 8], 4)
    assert want[want.isfinite()].std() > 0.02, "the reference says nothing: its logits are nearly constant"
    close(runner.draft_token(4, second[4], tokens[n - 9], 4), want)
    if states:
        third = runner.step({4: tokens[n - 9 : n - 1]}, {4: tokens[n - 1]})
        close(runner.draft_token(4, third[4], tokens[n - 1], 4), reference(tokens, 4))
        return
    # Guesses are verified and two of them are wrong: their rows are computed anew.
    wrong = [(token + 7) % 200 for token in tokens[n - 7 : n - 5]]
    runner.step({4: [tokens[n - 9], tokens[n - 8], *wrong]}, {}, [tokens[n - 8], tokens[n - 7], 3, 4])
    runner.lens[4] -= 2
    third = runner.step({4: tokens[n - 7 : n - 1]}, {4: tokens[n - 1]})
    close(runner.draft_token(4, third[4], tokens[n - 1], 4), reference(tokens, 4))
    _check_prefix(runner, reference, tokens, close)


def _check_prefix(
    runner: DraftRunner, reference: Reference, tokens: list[int], close: Callable[[Any, Any], None]
) -> None:
    """The draft's last row of a prefix depends on the token behind it, so it is computed with the rest."""
    shared = len(tokens) // 2
    runner.table[7, :shared] = runner.table[4, :shared]
    other = [*tokens[: shared + 1], *((token + 3) % 200 for token in tokens[shared + 1 :])]
    runner.lens[7] = shared
    state = runner.step({7: other[shared:-1]}, {7: other[-1]})[7]
    close(runner.draft_token(7, state, other[-1], 3), reference(other, 3))
