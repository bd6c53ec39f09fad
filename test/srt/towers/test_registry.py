"""The records of encoders: each names parts that exist and say the same."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from sglang.srt.models.transformers_backend.images import ClassEncoder
from sglang.srt.towers.base.encoder import VisionEncoder
from sglang.srt.towers.pictures.processor import load_processor
from sglang.srt.towers.registry import BY_MODEL_TYPE, TOWERS, TowerRecord, tower_record


@pytest.mark.parametrize("record", TOWERS, ids=lambda record: record.name)
def test_a_record_names_parts_that_exist(record: TowerRecord) -> None:
    module, _, name = record.encoder.partition(":")
    encoder = getattr(importlib.import_module(module), name)
    assert issubclass(encoder, ClassEncoder if record.by_class else VisionEncoder)
    processor = load_processor(record.name)
    for other in processor.other_classes.values():
        assert (load_processor(other).video is None) == (processor.video is None)


@pytest.mark.parametrize("record", TOWERS, ids=lambda record: record.name)
def test_prompts_hold_videos_where_the_processor_reads_them(record: TowerRecord) -> None:
    assert record.prompt.reads_videos == (load_processor(record.name).video is not None)


def test_a_model_type_has_one_record_and_a_description_one_encoder() -> None:
    assert len(BY_MODEL_TYPE) == sum(len(record.model_types) for record in TOWERS if not record.by_class)
    assert len({record.tower for record in TOWERS}) == len({record.encoder for record in TOWERS})


def test_a_model_without_a_vision_config_has_no_tower() -> None:
    assert tower_record({"model_type": "llama4"}) is None
    assert tower_record({"model_type": "llama", "vision_config": {}}) is None
    assert tower_record({"model_type": "llama4", "vision_config": {}}) is BY_MODEL_TYPE["llama4"]
    assert tower_record({"model_type": "mistral3", "vision_config": {}}) is None, "its family reads text alone"
    assert tower_record({"model_type": "mistral3", "vision_config": {}}, by_class=True) is not None


def test_the_front_loads_one_processor_and_no_encoder() -> None:
    code = (
        "import sys; from sglang.srt.towers.pictures.processor import load_processor; load_processor('gemma4');"
        "print(*(name for name in sys.modules if name.startswith('sglang.srt.towers.') or name == 'torch'))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "torch" not in loaded and not [name for name in loaded if name.endswith(".encoder")]
    assert [name for name in loaded if name.endswith(".processor")] == [
        "sglang.srt.towers.pictures.processor",
        "sglang.srt.towers.gemma4.processor",
    ]
