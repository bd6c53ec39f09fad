"""The context in which a block of a decoder layer is built, beside its scope and description."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.plan.model_description import ModelDescription


@dataclass(frozen=True, slots=True)
class Site:
    """The layer number, the model's description and its RoPE tables."""

    layer_id: int
    model: ModelDescription
    rotary: RotaryTables
