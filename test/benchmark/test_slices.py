"""Slices of published models for one GPU: what is written is what the server reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import slices

from sglang.srt.plan.model_description import ModelDescription, describe_model


def described(folder: Path) -> ModelDescription:
    return describe_model(json.loads((folder / "config.json").read_text()), None, source=str(folder))


@pytest.mark.parametrize("name", slices.LAYERS)
def test_a_slice_is_the_first_layers_of_the_model(name: str, tmp_path: Path) -> None:
    whole, part = described(slices.PUBLISHED / name), described(slices.write(name, tmp_path))
    count = slices.LAYERS[name]
    assert len(part.layers) == count < len(whole.layers) and part.layers == whole.layers[:count]
    assert (part.hidden_size, part.vocab_size) == (whole.hidden_size, whole.vocab_size)
