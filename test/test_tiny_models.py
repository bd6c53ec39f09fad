"""Models that are made once a run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_models
import torch
from srt.models.harness import save_tiny
from tiny_models import FOLDER, made_once


class Maker:
    """Makes a layer of random weights, and counts how often."""

    def __init__(self, columns: int = 3) -> None:
        self.columns, self.calls = columns, 0

    def __call__(self, folder: Path) -> torch.nn.Linear:
        self.calls += 1
        torch.manual_seed(0)
        layer = torch.nn.Linear(2, self.columns)
        folder.mkdir(parents=True)
        torch.save(layer.state_dict(), folder / "weights")
        return layer


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def made(make: Callable[[Path], torch.nn.Linear], folder: Path, what: object = "layer") -> torch.nn.Linear:
    return made_once(what, folder, make)


def test_the_second_is_a_copy_of_the_first(tmp_path: Path) -> None:
    make = Maker()
    first, numbers = made(make, tmp_path / "a"), torch.rand(3)
    (tmp_path / "a/weights").write_bytes(b"changed by a test")
    first.weight.data.zero_()
    second = made(make, tmp_path / "b")
    assert make.calls == 1 and torch.equal(torch.rand(3), numbers)
    assert torch.equal(torch.load(tmp_path / "b/weights")["weight"], second.weight) and second.weight.any()


def test_another_one_is_made(tmp_path: Path) -> None:
    make = Maker()
    made(make, tmp_path / "a", what=("layer", 1))
    made(make, tmp_path / "b", what=("layer", 2))
    assert make.calls == 2


def test_large_ones_are_not_kept(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "LARGEST_BYTES", 9 * 4 - 1)
    make = Maker()
    for name in "ab":
        made(make, tmp_path / name)
        assert (tmp_path / name / "weights").exists()
    assert make.calls == 2 and [path.suffix for path in run.iterdir()] == [".lock"]


def test_two_workers_wait_for_one_another(tmp_path: Path) -> None:
    make = Maker()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: made(make, tmp_path / name), "abcd"))
    assert make.calls == 1


def test_without_a_folder_each_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER)
    make = Maker()
    for name in "ab":
        made(make, tmp_path / name)
    assert make.calls == 2


@pytest.mark.parametrize("name", ["qwen3_tied_bias", "inkling", "deepseek_v4"])
def test_a_model_of_transformers_comes_back_whole(name: str, tmp_path: Path) -> None:
    """Tied weights are one tensor again; what a test changes in one does not reach the next."""
    tokens = torch.arange(1, 9)[None]
    expected = []
    for folder in ("a", "b"):
        model = save_tiny(name, tmp_path / folder)
        with torch.no_grad():
            expected.append(model(input_ids=tokens, use_cache=False).logits)
            model.get_input_embeddings().weight.zero_()
        if name == "qwen3_tied_bias":
            assert not model.get_output_embeddings().weight.any()
    assert torch.equal(*expected)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
