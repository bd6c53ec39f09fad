"""What every published config comes to: `descriptions` of it beside the golden texts in the folder of that name.

`UPDATE_GOLDEN=1 pytest test/srt/plan/test_descriptions.py -m "thorough or not thorough"` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from srt.kernels import published
from srt.plan.descriptions import describe, ranges

GOLDEN = Path(__file__).parent / "descriptions"
QUICK = (
    "DeepSeek-V2-Lite",
    "GLM-4.7-Flash",
    "Gemma-3-27B",
    "Gemma-4-26B-A4B-NVFP4",
    "Kimi-Linear-48B-A3B-Instruct",
    "Llama-3.2-1B",
    "Meta-Llama-3.1-70B",
    "MiMo-V2-Flash",
    "Mistral-Small-24B",
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "Qwen2-57B-A14B",
    "Qwen3-8B",
    "Qwen3-VL-8B-Instruct",
    "Qwen3.6-27B-NVFP4",
    "gpt_oss",
)
"""Models of most kinds, in which few tensors have names of their own."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.thorough) for each in published.every_name()]
)
def test_published_configs(name: str, tmp_path: Path) -> None:
    golden.check(describe(published.any_checkpoint(name, tmp_path / "model")), GOLDEN / f"{name}.txt")


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(published.every_name())
    assert set(QUICK) <= set(published.every_name())


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1, 2, 4], "0-2 4"),
        ([0, 2], "0 2"),
        ([1, 5, 9, 10], "1-9/4 10"),
        ([0, 1, 2, 5, 8, 11, 20], "0-2 5-11/3 20"),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
