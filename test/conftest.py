"""Tests marked `gpu` are skipped where there is no CUDA device."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("SGLANG_GRAMMAR_WARM_UP", "0")  # seconds of two processors for each server of a test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
