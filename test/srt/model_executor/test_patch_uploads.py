"""Patches on their way to the device: every part is whole, whatever was dropped before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.srt.model_executor import patch_uploads
from sglang.srt.model_executor.patch_uploads import PatchReader, PatchUploads
from sglang.srt.plan.media import PATCH_BUFFERS
from sglang.srt.towers.base.patch_places import Grid, frame_starts, num_patches
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.utils import shared_array

VALUES = 6
GRIDS: list[Grid] = [(1, 2, 4), (3, 2, 2), (1, 4, 4)]
PARTS: list[list[Grid]] = [[(1, 2, 4), (1, 2, 2)], [(1, 2, 2)], [(1, 2, 2)], [(1, 4, 4)]]
"""Some end inside an item."""


def places(grids: Sequence[Grid]) -> dict[str, np.ndarray]:
    return {"starts": frame_starts(grids)}


def written(directory: Path, seed: int, dtype: str = "float32") -> tuple[PatchReader, torch.Tensor]:
    rng, files, arrays, all_values = np.random.default_rng(seed), [], [], []
    for grid in GRIDS:
        values = rng.standard_normal((num_patches([grid]), VALUES), np.float32)
        array = shared_array.write(directory, as_type(values, dtype), "patches", dtype)
        files.append(shared_array.opened(directory, array))
        shared_array.remove(directory, array)
        arrays.append(array)
        all_values.append(torch.from_numpy(values))
    return PatchReader(files, arrays), torch.cat(all_values)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> PatchUploads:
    monkeypatch.setattr(patch_uploads, "PATCHES_A_STEP", 16)
    return PatchUploads(VALUES, torch.float32, "cpu")


def test_parts_of_steps_one_behind_the_other(uploads: PatchUploads, tmp_path: Path) -> None:
    for seed in range(3):
        reader, want = written(tmp_path, seed)
        got = []
        for part, grids in zip(uploads.send(reader, PARTS, places), PARTS, strict=True):
            assert part.grids == grids and part.places["starts"].tolist() == frame_starts(grids).tolist()
            got.append(part.pixels.clone())
        assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("taken", range(len(PARTS)))
def test_a_step_that_is_dropped(taken: int, uploads: PatchUploads, tmp_path: Path) -> None:
    dropped = uploads.send(written(tmp_path, 1)[0], PARTS, places)
    for _ in range(taken):
        next(dropped)
    del dropped
    reader, want = written(tmp_path, 2)
    assert torch.equal(torch.cat([part.pixels.clone() for part in uploads.send(reader, PARTS, places)]), want)


def test_a_part_stays_until_the_next_one_is_asked_for(uploads: PatchUploads, tmp_path: Path) -> None:
    reader, want = written(tmp_path, 3)
    arriving, first = uploads.send(reader, PARTS, places), 0
    for _ in PARTS:
        part = next(arriving)
        uploads._thread.submit(lambda: None).result()  # whatever was begun has ended
        assert torch.equal(part.pixels, want[first : first + len(part.pixels)])
        first += len(part.pixels)
    assert PATCH_BUFFERS < len(PARTS)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("taken", ["float32", "bfloat16"])
def test_types(stored: str, taken: str, tmp_path: Path) -> None:
    reader, want = written(tmp_path, 4, stored)
    values = torch.empty(want.numel(), dtype=getattr(torch, taken))
    reader.fill(values)
    stored_as, taken_as = getattr(torch, stored), getattr(torch, taken)
    assert torch.equal(values.view(want.shape), want.to(stored_as).to(taken_as))


def test_rounding_is_that_of_torch() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5))
    ties = torch.arange(1, 4097, dtype=torch.int32).mul(0x8000).add(0x3F800000).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, 1e-45])
    for part in (values, ties, special):
        got = torch.from_numpy(as_type(part.numpy(), "bfloat16")).view(torch.bfloat16)
        assert torch.equal(got, part.to(torch.bfloat16))


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    array = shared_array.write(tmp_path, np.zeros((4, VALUES), np.float32))
    file = shared_array.opened(tmp_path, array)
    with (tmp_path / array.name).open("r+b") as writer:
        writer.truncate(8)
    with pytest.raises(OSError, match="shorter"):
        PatchReader([file], [array]).fill(torch.empty(4 * VALUES))


def test_bits_of_another_size_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(shared_array.SharedArrayError, match="do not hold"):
        shared_array.write(tmp_path, np.zeros(4, np.float32), dtype="bfloat16")
    assert not list(tmp_path.iterdir())
