"""A drafter that knows what comes: outputs of an earlier run, some tokens of them spoilt."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_plan
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

Prompt = tuple[int, ...]


class KnownTexts:
    """Implements Drafter. `learn` says which text a request slot will hold."""

    def __init__(self, num_tokens: int, args: ServerArgs, spoil_every: int = 0) -> None:
        """spoil_every: each so manieth guess is wrong; 0: none."""
        plan = create_plan(args)
        self.num_tokens = num_tokens
        self.spoil_every, self.vocab_size = spoil_every, plan.model.vocab_size
        self.texts = torch.zeros(
            (plan.max_running_requests + 1, plan.context_len + num_tokens), dtype=torch.int64, device=plan.device
        )

    def learn(self, slot: int, text: list[int]) -> None:
        known = torch.tensor(text)
        if self.spoil_every:
            known[:: self.spoil_every] += 1
            known %= self.vocab_size
        self.texts[slot, : len(text)] = known.to(self.texts.device)

    def propose(self, slots: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ahead = torch.arange(1, self.num_tokens, device=slots.device)
        return self.texts[slots[:, None], lens[:, None] + ahead]


def verifying_scheduler(args: ServerArgs, drafter: KnownTexts, outputs: Mapping[Prompt, list[int]]) -> Scheduler:
    """A scheduler whose requests with these prompts are guessed to get these outputs."""
    runner = ModelRunner(create_plan(args), args.load_format, 0, drafter)
    original = runner.sampling_table.set

    def set_row(slot: int, params: object, seed: int, prompt_ids: list[int], *rest: object) -> None:
        drafter.learn(slot, prompt_ids + outputs[tuple(prompt_ids)])
        original(slot, params, seed, prompt_ids, *rest)  # type: ignore[arg-type]

    runner.sampling_table.set = set_row  # type: ignore[method-assign,assignment]
    return Scheduler(args, runner, StopChecker(None))
