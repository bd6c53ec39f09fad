"""A file whose experts were read into main memory is not kept by the system beside them."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.model_loader import page_cache, reads
from sglang.srt.model_loader.loader import load_model

from ..models.harness import plan_for, save_tiny
from ..models.test_expert_slots import offloaded
from .test_loader import _shard

FILES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("qwen3_moe", tmp_path)
    _shard(tmp_path, FILES)
    return tmp_path


def cached_pages(path: Path) -> int:
    """Returns how many pages of a file the system keeps."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        at = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), pages) == 0
        del view
    return sum(page & 1 for page in pages)


def drops(path: Path) -> bool:
    """Writes a file and returns whether its file system drops it when asked to; one in memory does not."""
    path.write_bytes(bytes(1 << 16))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not cached_pages(path)


def test_files_are_dropped_one_by_one_while_experts_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once nothing refers to it: the system keeps what a process has mapped. Resident weights leave it alone."""
    files = sorted(folder.glob("*.safetensors"))
    real, forgotten, left = page_cache.forget, list[str](), list[int]()
    on_disk = drops(folder / "probe")
    for path in files:
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        path.read_bytes()

    def forget(path: Path) -> None:
        real(path)
        forgotten.append(path.name)
        left.append(cached_pages(path) if on_disk else 0)

    monkeypatch.setattr(page_cache, "forget", forget)
    load_model(plan_for(folder))
    assert not forgotten
    load_model(offloaded(folder, 2, 4))
    assert forgotten[: FILES - 1] == [path.name for path in files[:-1]], "while others are read"
    assert sorted(forgotten[FILES - 1 :]) == [path.name for path in files], "in the end, when all ranks have read"
    assert left == [0] * len(left)


def test_a_read_that_fails_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: torch.Tensor, source: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(reads, "_copy", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        load_model(offloaded(folder, 2, 4))


def test_experts_are_read_beside_one_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time, and as they are in the files."""
    real, began, another = reads._copy, list[int](), threading.Event()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        began.append(1)
        if len(began) > 1:
            another.set()
        assert another.wait(300), "the first copy ends before another begins"
        real(target, source)

    monkeypatch.setattr(reads, "_copy", copy)
    model = load_model(offloaded(folder, 2, 4))
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    slots = model.expert_buffers.layers[0]  # type: ignore[union-attr]
    down = stored["model.layers.0.mlp.experts.1.down_proj.weight"]
    assert torch.equal(slots.bank[1].data[1], down.to(slots.bank[1].data.dtype))
