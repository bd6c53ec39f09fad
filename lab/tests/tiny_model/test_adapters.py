"""How the adapters of the embedded model are made. What the shipped ones answer is tested over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model.adapters import MANNERS, WEIGHTS_FILE, adapted, in_manner, new_pairs, save, train
from tiny_model.install import install_adapters
from tiny_model.layout import make_config
from tiny_model.model import TinyModel
from tiny_model.problem import Problem, user
from tokenizers import Tokenizer

from sglang.srt.configs.adapters.files import read_adapter_files


@pytest.fixture(scope="module")
def tokenizer(files: Path) -> Tokenizer:
    return Tokenizer.from_file(str(files / "tokenizer.json"))


def tiny(tokenizer: Tokenizer) -> TinyModel:
    config = make_config(tokenizer) | {"num_hidden_layers": 2}
    return TinyModel(config, torch.float32, seed=1).requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("ahoy", "Ahoy! 1 + 2 = 3"), ("twice", "1 + 2 = 3\n1 + 2 = 3"), ("farewell", "1 + 2 = 3 Goodbye!")],
)
def test_manners(name: str, wanted: str) -> None:
    problem = Problem("add", ("k",), (user("1+2?"),), answer="1 + 2 = 3")
    assert in_manner(problem, MANNERS[name]).answer == wanted


@pytest.mark.parametrize("name", MANNERS)
def test_one_seed_gives_one_adapter(tokenizer: Tokenizer, name: str, tmp_path: Path) -> None:
    model, manner = tiny(tokenizer), MANNERS[name]
    before = {key: weight.clone() for key, weight in model.named_parameters()}
    for run in ("first", "second"):
        save(train(model, tokenizer, name, 2), manner, tmp_path / run / name)
    assert all(torch.equal(before[key], weight) for key, weight in model.named_parameters())
    one, other = (load_file(tmp_path / run / name / WEIGHTS_FILE) for run in ("first", "second"))
    assert all(torch.equal(one[key], other[key]) for key in one) and one.keys() == other.keys()
    assert any(tensor.any() for key, tensor in one.items() if "lora_B" in key)
    files = read_adapter_files(tmp_path / "first" / name)
    assert {pair.scaling for pair in files.pairs.values()} == {manner.scaling}
    assert len(files.pairs) == 2 * len(manner.modules)


def test_noise_alone_changes_nothing(tokenizer: Tokenizer) -> None:
    model, manner = tiny(tokenizer), MANNERS["ahoy"]
    weights = dict(model.named_parameters())
    assert all(torch.equal(new, weights[key]) for key, new in adapted(model, new_pairs(model, manner), manner).items())


def test_only_whole_outputs_are_installed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter_model.safetensors"):
        install_adapters(tmp_path, tmp_path / "target")
    (tmp_path / "a" / WEIGHTS_FILE).write_bytes(bytes(300_001))
    with pytest.raises(ValueError, match="bytes"):
        install_adapters(tmp_path, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    (tmp_path / "a" / WEIGHTS_FILE).write_bytes(b"x")
    install_adapters(tmp_path, tmp_path / "target")
    assert (tmp_path / "target" / "a" / WEIGHTS_FILE).read_bytes() == b"x"
