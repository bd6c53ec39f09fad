"""The encoders of images and videos, a record each.

A record names encoder and processor instead of importing them: planning loads no torch, and a process that prepares
pictures loads the processor of its own model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.towers.base.spec import Tower
from sglang.srt.towers.deepseek_v4.spec import FILL, PairedRowsTower, describe_paired_rows, flat_keys
from sglang.srt.towers.deepseek_v41.spec import DeepseekVitTower, describe_deepseek_vit
from sglang.srt.towers.dots3_note.spec import Dots3Tower, describe_dots3
from sglang.srt.towers.gemma4.spec import Gemma4Tower, describe_gemma4
from sglang.srt.towers.glm4v.spec import Glm4vTower, describe_glm4v
from sglang.srt.towers.glm5_next.spec import describe_glm5_next
from sglang.srt.towers.inkling.spec import InklingTower, describe_inkling
from sglang.srt.towers.kimi_k25.spec import MoonViTTower, describe_moonvit
from sglang.srt.towers.llama4.spec import Llama4Tower, describe_llama4
from sglang.srt.towers.mimo_v2.spec import MiMoTower, describe_mimo
from sglang.srt.towers.minimax_m3.spec import MiniMaxM3Tower, describe_minimax_m3
from sglang.srt.towers.muse_glimmer.spec import MuseGlimmerTower, describe_muse_glimmer
from sglang.srt.towers.qwen2_5_vl.spec import Qwen2_5VLTower, describe_qwen2_5_vl
from sglang.srt.towers.qwen3_vl.spec import Qwen3VLTower, describe_qwen3_vl
from sglang.srt.towers.step3p7.spec import Step3Tower, describe_step3
from sglang.srt.towers.transformers_class.spec import MODEL_TYPES, WITH_OTHER_TEXT, ClassTower, describe_class_tower

_TOWERS = "sglang.srt.towers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """How prompts of a model show images and videos.

    default_ids: placeholders of an image and of a video that configs may leave out; 0: none
    marks: keys of config.json with the tokens around a placeholder, which each frame of a video repeats
    run_marks: keys of config.json with the tokens that are added around each run of placeholders
    reads_videos: the model takes videos
    frames_are_images: the repeated placeholder of a video is that of images
    image_text: text of an image's placeholder, where prompts are changed before they are tokenized
    picture_text: text that templates write for an image instead of `image_text`
    video_text: text that templates write for a video, which has the placeholder of images then
    fill: number of an item's first tokens that only fill the prompt before it up to a multiple of one more: behind n
        tokens, n % (fill + 1) of them are left out
    """

    default_ids: tuple[int, int] = (0, 0)
    marks: tuple[str, str] | None = None
    run_marks: tuple[str, str] | None = None
    reads_videos: bool = True
    frames_are_images: bool = False
    image_text: str = ""
    picture_text: str = ""
    video_text: str = ""
    fill: int = 0


def _section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    keys = config.get("vision_config")
    return keys if isinstance(keys, Mapping) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """An encoder of images and videos.

    processor: the module that prepares pictures
    model_types: values of `model_type` in config.json
    describe: called with the whole config and the encoder's keys
    keys: returns the encoder's keys of a config.json; None: it has no encoder
    tower: type of the description
    encoder: "module:class" that computes the description
    sections: a placeholder's position has a time, a row and a column (M-RoPE)
    by_class: a class of transformers computes it, beside a model that a class computes
    """

    processor: str
    model_types: tuple[str, ...]
    describe: Callable[[ConfigReader, ConfigReader], Tower]
    tower: type[Tower]
    encoder: str
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = _section
    sections: bool = False
    by_class: bool = False
    prompt: PromptForm = PromptForm()

    @property
    def name(self) -> str:
        """Name of the folder of the processor."""
        return _folder(self.processor)


def _folder(module: str) -> str:
    return module.split(".")[-2]


TOWERS = (
    TowerRecord(
        processor=f"{_TOWERS}.qwen2_5_vl.processor",
        model_types=("qwen2_5_vl",),
        describe=describe_qwen2_5_vl,
        tower=Qwen2_5VLTower,
        encoder=f"{_TOWERS}.qwen2_5_vl.encoder:Qwen2_5VLEncoder",
        sections=True,
    ),
    TowerRecord(
        processor=f"{_TOWERS}.qwen3_vl.processor",
        model_types=(
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen4_exp",
            "qwen3_8_flash_next",
        ),
        describe=describe_qwen3_vl,
        tower=Qwen3VLTower,
        encoder=f"{_TOWERS}.qwen3_vl.encoder:Qwen3VLEncoder",
        sections=True,
        prompt=PromptForm(marks=("vision_start_token_id", "vision_end_token_id")),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.glm4v.processor",
        model_types=("glm4v", "glm4v_moe", "glm46v"),
        describe=describe_glm4v,
        tower=Glm4vTower,
        encoder=f"{_TOWERS}.glm4v.encoder:Glm4vEncoder",
        sections=True,
        prompt=PromptForm(frames_are_images=True),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.glm5_next.processor",
        model_types=("glm5_next",),
        describe=describe_glm5_next,
        tower=Glm4vTower,
        encoder=f"{_TOWERS}.glm4v.encoder:Glm4vEncoder",
        prompt=PromptForm(frames_are_images=True),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.gemma4.processor",
        model_types=("gemma4",),
        describe=describe_gemma4,
        tower=Gemma4Tower,
        encoder=f"{_TOWERS}.gemma4.encoder:Gemma4Encoder",
        prompt=PromptForm(run_marks=("boi_token_id", "eoi_token_id")),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.kimi_k25.processor",
        model_types=("kimi_k25",),
        describe=describe_moonvit,
        tower=MoonViTTower,
        encoder=f"{_TOWERS}.kimi_k25.encoder:MoonViTEncoder",
        prompt=PromptForm(image_text="<|media_pad|>", video_text="<|kimi_k25_video_placeholder|>"),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.step3p7.processor",
        model_types=("step3p7",),
        describe=describe_step3,
        tower=Step3Tower,
        encoder=f"{_TOWERS}.step3p7.encoder:Step3Encoder",
        prompt=PromptForm(reads_videos=False),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.minimax_m3.processor",
        model_types=("minimax_m3_vl",),
        describe=describe_minimax_m3,
        tower=MiniMaxM3Tower,
        encoder=f"{_TOWERS}.minimax_m3.encoder:MiniMaxM3Encoder",
    ),
    TowerRecord(
        processor=f"{_TOWERS}.dots3_note.processor",
        model_types=("dots3_note",),
        describe=describe_dots3,
        tower=Dots3Tower,
        encoder=f"{_TOWERS}.dots3_note.encoder:Dots3Encoder",
        prompt=PromptForm(default_ids=(151660, 151680)),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.mimo_v2.processor",
        model_types=("mimo_v2",),
        describe=describe_mimo,
        tower=MiMoTower,
        encoder=f"{_TOWERS}.mimo_v2.encoder:MiMoEncoder",
        prompt=PromptForm(default_ids=(151655, 151656), marks=("vision_start_token_id", "vision_end_token_id")),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.muse_glimmer.processor",
        model_types=("muse_glimmer", "muse_spark"),
        describe=describe_muse_glimmer,
        tower=MuseGlimmerTower,
        encoder=f"{_TOWERS}.muse_glimmer.encoder:MuseGlimmerEncoder",
        prompt=PromptForm(default_ids=(200092, 200091)),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.llama4.processor",
        model_types=("llama4",),
        describe=describe_llama4,
        tower=Llama4Tower,
        encoder=f"{_TOWERS}.llama4.encoder:Llama4Encoder",
        prompt=PromptForm(
            default_ids=(200092, 0), reads_videos=False, image_text="<|patch|>", picture_text="<|image|>"
        ),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.inkling.processor",
        model_types=("inkling_mm_model",),
        describe=describe_inkling,
        tower=InklingTower,
        encoder=f"{_TOWERS}.inkling.encoder:InklingEncoder",
        prompt=PromptForm(
            default_ids=(200054, 0),
            reads_videos=False,
            image_text="<|content_image|><|unused_200054|>",
            picture_text="<|content_image|>",
        ),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.deepseek_v4.processor",
        model_types=("deepseek_v4", "deepseek_ref"),
        describe=describe_paired_rows,
        tower=PairedRowsTower,
        encoder=f"{_TOWERS}.deepseek_v4.encoder:PairedRowsEncoder",
        keys=flat_keys,
        prompt=PromptForm(default_ids=(129264, 0), reads_videos=False, fill=FILL),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.deepseek_v41.processor",
        model_types=("deepseek_v41",),
        describe=describe_deepseek_vit,
        tower=DeepseekVitTower,
        encoder=f"{_TOWERS}.deepseek_v41.encoder:DeepseekVitEncoder",
        prompt=PromptForm(default_ids=(129264, 0), reads_videos=False),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.transformers_class.processor",
        model_types=tuple(kind for kind in MODEL_TYPES if kind not in WITH_OTHER_TEXT),
        describe=describe_class_tower,
        tower=ClassTower,
        encoder="sglang.srt.models.transformers_backend.images:ClassEncoder",
        by_class=True,
        prompt=PromptForm(reads_videos=False),
    ),
    TowerRecord(
        processor=f"{_TOWERS}.transformers_class.processor",
        model_types=WITH_OTHER_TEXT,
        describe=describe_class_tower,
        tower=ClassTower,
        encoder="sglang.srt.models.transformers_backend.images:ClassEncoder",
        by_class=True,
        prompt=PromptForm(reads_videos=False, image_text="<|IMG_PATCH|>", picture_text="<image>"),
    ),
)
"""Models with an image encoder that is implemented; others are served for text alone."""

BY_MODEL_TYPE: Mapping[str, TowerRecord] = {
    name: record for record in TOWERS if not record.by_class for name in record.model_types
}
"""Records of models that a family computes."""
_OF_CLASSES: Mapping[str, TowerRecord] = {
    name: record for record in TOWERS if record.by_class for name in record.model_types
}
_BY_FILES = (f"{_TOWERS}.glm46v.processor",)
"""Processors that the files of a checkpoint choose instead of the record's."""
PROCESSORS: Mapping[str, str] = {
    _folder(module): module for module in (*(record.processor for record in TOWERS), *_BY_FILES)
}
"""Modules of processors, by their folders."""


def reads_images(config: Mapping[str, Any]) -> bool:
    """Returns whether the class of transformers that a config.json names also encodes images here."""
    return tower_record(config, by_class=True) is not None


def tower_record(config: Mapping[str, Any], by_class: bool = False) -> TowerRecord | None:
    """Returns the record for a config.json; None if the model has no encoder, or one that is not implemented. by_class:
    a class of transformers computes the model."""
    record = (_OF_CLASSES if by_class else BY_MODEL_TYPE).get(str(config.get("model_type")))
    return record if record is not None and record.keys(config) is not None else None
