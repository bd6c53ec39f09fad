"""Creates the image and video encoder of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.models.vision.deepseek_vit import DeepseekVitEncoder
from sglang.srt.models.vision.encoder import VisionEncoder
from sglang.srt.models.vision.gemma4 import Gemma4Encoder
from sglang.srt.models.vision.glm4v import Glm4vEncoder
from sglang.srt.models.vision.inkling import InklingEncoder
from sglang.srt.models.vision.llama4 import Llama4Encoder
from sglang.srt.models.vision.minimax_m3 import MiniMaxM3Encoder
from sglang.srt.models.vision.moonvit import MoonViTEncoder
from sglang.srt.models.vision.muse_glimmer import MuseGlimmerEncoder
from sglang.srt.models.vision.qwen2_5_vl import Qwen2_5VLEncoder
from sglang.srt.models.vision.qwen3_vl import Qwen3VLEncoder
from sglang.srt.models.vision.step3 import Step3Encoder
from sglang.srt.plan.towers.deepseek_vit import DeepseekVitTower
from sglang.srt.plan.towers.gemma4 import Gemma4Tower
from sglang.srt.plan.towers.glm4v import Glm4vTower
from sglang.srt.plan.towers.inkling import InklingTower
from sglang.srt.plan.towers.llama4 import Llama4Tower
from sglang.srt.plan.towers.minimax_m3 import MiniMaxM3Tower
from sglang.srt.plan.towers.moonvit import MoonViTTower
from sglang.srt.plan.towers.muse_glimmer import MuseGlimmerTower
from sglang.srt.plan.towers.qwen2_5_vl import Qwen2_5VLTower
from sglang.srt.plan.towers.qwen3_vl import Qwen3VLTower
from sglang.srt.plan.towers.step3 import Step3Tower
from sglang.srt.plan.towers.tower import Tower

if TYPE_CHECKING:
    from sglang.srt.plan.plan import Plan

_CLASSES: Mapping[type[Tower], Callable[..., VisionEncoder[Any]]] = {
    Qwen2_5VLTower: Qwen2_5VLEncoder,
    Qwen3VLTower: Qwen3VLEncoder,
    MoonViTTower: MoonViTEncoder,
    Glm4vTower: Glm4vEncoder,
    Gemma4Tower: Gemma4Encoder,
    MiniMaxM3Tower: MiniMaxM3Encoder,
    Step3Tower: Step3Encoder,
    MuseGlimmerTower: MuseGlimmerEncoder,
    Llama4Tower: Llama4Encoder,
    InklingTower: InklingEncoder,
    DeepseekVitTower: DeepseekVitEncoder,
}


def create_encoder(plan: Plan, tower: Tower) -> VisionEncoder[Any]:
    """Creates the encoder that `tower` describes; its weights are not loaded yet."""
    return _CLASSES[type(tower)](plan, tower)
