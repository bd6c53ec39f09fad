"""Predictions of the steps of a layout on a card that someone has timed (`sglang.tuning`)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.drafts.description import DraftDescription
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.tuning.draft_steps import DraftedStep, time_drafted
from sglang.tuning.rates import ceilings_of
from sglang.tuning.steps import Step, StepTime, decode_step, prefill_step, verify_step
from sglang.tuning.two_batch_overlap import step_time


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one server's device, without its host: a decode step of one request, of those of the load,
    and a prompt."""

    one: StepTime
    loaded: StepTime
    prefill: StepTime
    drafted: tuple[DraftedStep, DraftedStep] | None = None
    """Steps with drafts of one request and of the load, where the flags ask for drafts."""


def predict(
    model: ModelDescription,
    parallel: ParallelConfig,
    arch: ArchTraits,
    requests: int,
    length: int,
    draft: DraftDescription | None = None,
    width: int = 1,
) -> Prediction | None:
    """Requests of `length` tokens, with drafts of `width` tokens in each step. None for a card whose rates nobody
    measured, or a model that cannot be divided so."""

    def timed(step: Step) -> StepTime:
        return step_time(model, parallel, step, arch)

    def drafted(batch: int) -> DraftedStep:
        return time_drafted(model, draft, parallel, verify_step(batch, width, length), arch)

    try:
        ceilings_of(arch)
        return Prediction(
            timed(decode_step(1, length)),
            timed(decode_step(requests, length)),
            timed(prefill_step(length)),
            (drafted(1), drafted(requests)) if width > 1 else None,
        )
    except UserError:
        return None
