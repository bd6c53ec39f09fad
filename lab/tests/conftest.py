"""Puts the folders of lab/ on the path: its scripts import each other by name, as when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1]
BENCHMARK = LAB.parent / "benchmark"
FOLDERS = (
    "kernels",
    "kernels/fused_moe_triton",
    "kernels/card",
    "parallel",
    "peers",
    "media",
    "evals",
    "speculation",
    "gpu",
)
sys.path[:0] = [str(LAB), *(str(root / name) for root in (LAB, BENCHMARK) for name in FOLDERS)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
