"""Creates the image and video encoder of a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.base.spec import Tower
from sglang.srt.towers.registry import TOWERS

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan


def create_encoder(plan: Plan, tower: Tower) -> VisionEncoder[Any]:
    """Creates the encoder that `tower` describes; its weights are not loaded yet. That of a class of transformers has
    the methods of a VisionEncoder but those to pause."""
    record = next(record for record in TOWERS if record.tower is type(tower))
    module, _, name = record.encoder.partition(":")
    encoder: type[VisionEncoder[Any]] = getattr(importlib.import_module(module), name)
    return encoder(plan, tower)
