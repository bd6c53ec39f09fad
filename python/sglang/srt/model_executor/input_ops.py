"""The ops that read and write the device's tables between two steps."""

from __future__ import annotations

from typing import TypeVar

from sglang.srt.kernels.op import Op
from sglang.srt.layers.ops import ACCEPT_DRAFTS, DECODE_INPUTS, DRAFT_INPUTS, VERIFY_INPUTS
from sglang.srt.plan.plan import Plan

T = TypeVar("T")


class InputOps:
    """The plan's kernels; plain torch for ops that are not planned, and without a plan."""

    def __init__(self, plan: Plan | None = None) -> None:
        def kernel(op: Op[T]) -> T:
            return op.reference if plan is None or op.name not in plan.choices else plan.entry(op)

        self.decode_inputs = kernel(DECODE_INPUTS)
        self.verify_inputs = kernel(VERIFY_INPUTS)
        self.draft_inputs = kernel(DRAFT_INPUTS)
        self.accept_drafts = kernel(ACCEPT_DRAFTS)
