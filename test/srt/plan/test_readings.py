"""What every published config is read as: `readings` of it beside the golden texts in the folder of that name.

`UPDATE_GOLDEN=1 pytest test/srt/plan/test_readings.py` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from srt.kernels import published
from srt.plan.readings import read

GOLDEN = Path(__file__).parent / "readings"


@pytest.mark.parametrize("name", published.every_name())
def test_published_configs(name: str, tmp_path: Path) -> None:
    golden.check(read(published.any_checkpoint(name, tmp_path / "model")), GOLDEN / f"{name}.txt")


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(published.every_name())
