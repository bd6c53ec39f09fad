"""Context that a block of a decoder layer is built in, beside its scope and its description."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.plan.model_description import ModelDescription


@dataclass(frozen=True, slots=True)
class Site:
    layer_id: int
    model: ModelDescription
    rotary: RotaryTables
