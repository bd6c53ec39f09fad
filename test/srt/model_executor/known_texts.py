"""A drafter that knows what comes: outputs of an earlier run, some tokens of them spoilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sglang.srt.drafts.drafter import DraftStep
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs

Outputs = Mapping[tuple[int, ...], list[int]]
"""By prompt."""


MAX_STEPS_IN_FLIGHT = 3
"""Of schedulers in tests, which launch steps further ahead than the flags do."""


class KnownTexts:
    """Implements Drafter."""

    aux_layers = ()
    next_tokens_read = 0
    caches = ()

    def __init__(self, num_tokens: int, spoil_every: int = 0, lookahead_slots: int = 0) -> None:
        """spoil_every: each so manieth guess is wrong; 0: none."""
        self.num_tokens, self.spoil_every, self.lookahead_slots = num_tokens, spoil_every, lookahead_slots

    def prepared(self, plan: Plan, outputs: Outputs) -> KnownTexts:
        """Requests with these prompts are drafted to get these outputs."""
        self.outputs, self.vocab_size = outputs, plan.model.vocab_size
        self.texts = torch.zeros(
            (plan.max_running_requests + 1, plan.context_len + self.num_tokens), dtype=torch.int64, device=plan.device
        )
        return self

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        prompts = [ids for ids in self.outputs if tuple(tokens[: len(ids)]) == ids]
        prompt = max(prompts, key=len)
        known = torch.tensor([*prompt, *self.outputs[prompt]])
        if self.spoil_every:
            known[:: self.spoil_every] += 1
            known %= self.vocab_size
        self.texts[slot, : len(known)] = known.to(self.texts.device)

    def propose(self, step: DraftStep, num_speculative_tokens: int) -> torch.Tensor:
        ahead = torch.arange(1, num_speculative_tokens + 1, device=step.slots.device)
        return self.texts[step.slots[:, None], step.lens[:, None] + ahead]


def verifying_runner(
    args: ServerArgs, drafter: KnownTexts, outputs: Outputs, rank: int = 0, rendezvous: str | None = None
) -> ModelRunner:
    plan = create_plan(args, rank, rendezvous)
    uncertain_slots = MAX_STEPS_IN_FLIGHT * (drafter.num_tokens - 1) + drafter.num_tokens + drafter.lookahead_slots
    # What the flags say of drafts that they know, and windows for it.
    windows = tuple(replace(size, tokens=plan.max_total_num_tokens) for size in plan.windows)
    plan = replace(plan, uncertain_slots=uncertain_slots, windows=windows)
    return ModelRunner(plan, args.load_format, 0, lambda model, plan: drafter.prepared(plan, outputs))


def verifying_scheduler(args: ServerArgs, drafter: KnownTexts, outputs: Outputs) -> Scheduler:
    return Scheduler(args, verifying_runner(args, drafter, outputs), StopChecker(None))
