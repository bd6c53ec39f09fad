"""Predictions of a layout's steps on a card whose rates were measured (`sglang.tuning`)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.drafts.spec import DraftDescription
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.tuning.draft_steps import DraftedStep, time_drafted
from sglang.tuning.rates import ceilings_of
from sglang.tuning.step import Step, decode_step, prefill_step, verify_step
from sglang.tuning.steps import StepTime
from sglang.tuning.two_batch_overlap import step_time


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted device times of one server, without its host: a decode step of one request, a decode step of the load,
    and the prefill of a prompt."""

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
    """Predicts decode steps of 1 and of `requests` requests of `length` tokens, and the prefill of one. With `draft`
    and `width` > 1 also steps that verify `width` tokens of each request. Returns None for a card without measured
    rates, or a layout that does not divide the model."""

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
