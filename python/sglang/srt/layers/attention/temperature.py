"""Queries that grow with their position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.plan.attention_parts import AttentionTemperature

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


def growth_of_queries(batch: ForwardBatch, temperature: AttentionTemperature) -> torch.Tensor:
    """Returns the attention temperature factors [T, 1] fp32 of queries by position, computed once per step. Source:
    Llama 4 (arXiv 2501.19399); Ministral 3 uses it without an offset, Inkling smooth."""
    name = f"attn_temperature.{temperature}"
    if name not in batch.step_cache:
        ends, length = batch.positions + temperature.offset, temperature.length
        if temperature.smooth:
            logs = torch.log((ends / length).clamp(min=1.0))
        else:
            logs = torch.log1p(torch.div(ends, length, rounding_mode="floor").float())
        batch.step_cache[name] = (1.0 + temperature.scale * logs)[:, None]
    return batch.step_cache[name]
