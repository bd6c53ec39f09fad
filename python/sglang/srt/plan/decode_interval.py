"""Chooses how many steps without prompts follow one with prompts (--prefill-decode-interval)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.two_batch_overlap import has_experts
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class IntervalRule:
    """After a step with prompts `steps` steps without any follow, while at least `least_running` requests run."""

    steps: int
    least_running: int


NEVER = IntervalRule(0, 1)
MANY_REQUESTS = IntervalRule(3, 128)
"""Where many requests run, some end in every step, and the prompts that replace them make every step slow for all.
Qwen3-8B with 256 requests on an H100: the time between tokens is 14 ms (median) instead of 41, 32 instead of 41 on
average, and the first token comes after 347 ms instead of 267. Qwen3-30B-A3B lost a quarter of its tokens a second for
an unknown reason, so models with experts do without."""


def interval_rule(args: ServerArgs, model: ModelDescription) -> IntervalRule:
    """Returns the rule by the flags, or the default. `model`: all stages of it, so that all ranks have the same
    rule."""
    if args.prefill_decode_interval is not None:
        return IntervalRule(args.prefill_decode_interval, args.prefill_decode_interval_min_bs)
    return NEVER if has_experts(model) else MANY_REQUESTS
