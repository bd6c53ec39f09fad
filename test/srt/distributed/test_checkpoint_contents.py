"""Copies of a checkpoint on several machines are compared by what the server reads of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.distributed.agreement import refuse_difference
from sglang.srt.distributed.checkpoint_contents import checkpoint_contents
from sglang.srt.errors import UserError


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    for name in ("one", "two"):
        shutil.copytree(DEFAULT_MODEL_PATH, tmp_path / name)
    return [tmp_path / "one", tmp_path / "two"]


def refused(copies: list[Path], **options: bool) -> str:
    files = {rank: checkpoint_contents(folder, **options) for rank, folder in enumerate(copies)}
    try:
        refuse_difference(["machine 0", "machine 1"], files, "have different copies of the model")
    except UserError as error:
        return str(error)
    return ""


def test_equal_copies_are_accepted(copies: list[Path]) -> None:
    assert {"config.json", "tokenizer.json"} <= checkpoint_contents(copies[0]).keys()
    (copies[1] / "README.md").write_text("notes of one machine")
    assert not refused(copies)


def test_another_tokenizer_is_named(copies: list[Path]) -> None:
    path = copies[1] / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    message = refused(copies)
    assert message.startswith("rank 0 (machine 0) and rank 1 (machine 1) have different copies of the model: ")
    assert "tokenizer.json: " in message and "the same release, flags, checkpoint" in message


def test_weights_are_told_apart_by_size_and_header(copies: list[Path]) -> None:
    weights = next(copies[1].glob("*.safetensors"))
    data = weights.read_bytes()
    for changed in (data[:-4], data.replace(b'"F32"', b'"I32"', 1).replace(b'"BF16"', b'"F16 "', 1)):
        weights.write_bytes(changed)
        assert f"{weights.name}: " in refused(copies)
        assert not refused(copies, with_weights=False), "weights that are not loaded"
    weights.unlink()
    assert f"{weights.name}: " in refused(copies) and "nothing" in refused(copies)


def test_a_damaged_file_is_named(copies: list[Path]) -> None:
    weights = next(copies[1].glob("*.safetensors"))
    weights.write_bytes(b"short")
    assert f"{weights.name} is not a readable safetensors file" in refused(copies)
