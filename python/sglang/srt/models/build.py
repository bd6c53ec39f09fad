"""Builds the planned model: a family's blocks, or a class of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


def build_model(plan: Plan, device: torch.device | str | None = None) -> CausalLM:
    """Builds the model of a plan; arguments as in CausalLM."""
    if plan.description.transformers_class is None:
        return CausalLM(plan, device)
    # These import transformers' model code, which takes seconds.
    from sglang.srt.models.transformers_backend.model import TransformersModel
    from sglang.srt.models.transformers_backend.text_model import TextModel

    return (TransformersModel if plan.description.pooling is None else TextModel)(plan, device)
