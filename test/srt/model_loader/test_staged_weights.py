"""New weights in the memory of a running model: every stored form becomes what a model has that was started with
them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.errors import UserError
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.staged_weights import ServedWeights, commit
from sglang.srt.model_loader.tensor_pairs import copy_pairs, tensor_pairs

from ..models.harness import plan_for, save_tiny
from ..models.quantized_checkpoints import FORMS, save_quantized

TINY = ("qwen3", "qwen3_moe_mixed", "deepseek_v2", "gpt_oss", "gemma3", "qwen3_5")


def other_weights(folder: Path, to: Path) -> Path:
    """Copies a model and gives its matrices their rows in another order, which any stored form allows."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: rolled(tensor) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}, file)
    return to


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.contiguous().view(torch.uint8)
    return rows.roll(1, 0).view(tensor.dtype)


def content(top: object) -> dict[str, torch.Tensor]:
    return {pair.path: pair.served.detach().clone().contiguous() for pair in tensor_pairs(top, top)}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(as_bytes(tensor), as_bytes(right[name])), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def check(first: Path, second: Path) -> None:
    model, fresh = load_model(plan_for(first)), load_model(plan_for(second))
    served = ServedWeights(plan_for(first), model)
    before, addresses = content(model), [tensor.data_ptr() for _, tensor in served.tensors()]
    pairs = served.stage(str(second), {}, {}, "auto", 0, "cpu")
    assert_equal(content(model), before)  # staging changes nothing
    commit(pairs)
    assert [tensor.data_ptr() for _, tensor in served.tensors()] == addresses
    after = content(model)
    assert_equal(after, content(fresh))
    num_changed = sum(not torch.equal(as_bytes(tensor), as_bytes(before[name])) for name, tensor in after.items())
    assert num_changed >= 3 * 3  # in each layer what attention and the feed-forward block multiply with
    walked = {tensor.data_ptr() for _, tensor in served.tensors()}
    assert all(param.tensor.data_ptr() in walked for param in model.params.values() if param.tensor.numel())


@pytest.mark.parametrize("name", TINY)
def test_16_bits_become_what_a_fresh_model_has(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "first")
    check(tmp_path / "first", other_weights(tmp_path / "first", tmp_path / "second"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3_wide", "qwen3_moe_wide"])
def test_each_stored_form_becomes_what_a_fresh_model_has(name: str, form: str, tmp_path: Path) -> None:
    save_quantized(name, FORMS[form], tmp_path)
    first = tmp_path / "quantized"
    check(first, other_weights(first, tmp_path / "second"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3_wide", "qwen3_moe_wide"])
def test_each_stored_form_is_read_again(name: str, form: str, tmp_path: Path) -> None:
    save_quantized(name, FORMS[form], tmp_path)
    check_reading(tmp_path / "quantized")


@pytest.mark.parametrize("name", TINY)
def test_16_bits_are_read_again(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "first")
    check_reading(tmp_path / "first")


def check_reading(folder: Path) -> None:
    """Loses what is said to be read again, and reads it."""
    model = load_model(plan_for(folder))
    served, before = ServedWeights(plan_for(folder), model), content(model)
    for tensor in served.tensors_read_again():
        with torch.inference_mode():
            torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).fill_(0xFF)
    served.read_again("auto", 0)
    assert_equal(content(model), before)


def test_sent_tensors_take_the_place_of_stored_ones(tmp_path: Path) -> None:
    save_quantized("qwen3_wide", FORMS["fp8_block"], tmp_path)
    first = tmp_path / "quantized"
    second = other_weights(first, tmp_path / "second")
    model, fresh = load_model(plan_for(first)), load_model(plan_for(second))
    served = ServedWeights(plan_for(first), model)
    assert not served.takes_single_tensors
    commit(served.stage(None, load_file(second / "model.safetensors"), {}, "auto", 0, "cpu"))
    assert_equal(content(model), content(fresh))


def test_a_model_of_other_sizes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "first")
    save_tiny("qwen3", tmp_path / "second", num_hidden_layers=2)
    one, other = load_model(plan_for(tmp_path / "first")), load_model(plan_for(tmp_path / "second"))
    with pytest.raises(UserError, match="parts in model.layers"):
        tensor_pairs(one, other)


def test_a_number_in_captured_steps_is_refused() -> None:
    def product(factor: float) -> Any:
        return lambda x: x * factor

    with pytest.raises(UserError, match=r"factor is 1.0 .* and 2.0"):
        tensor_pairs(product(1.0), product(2.0))


def test_transposed_memory_is_copied() -> None:
    one, other = torch.zeros(3, 4).t(), torch.arange(12.0).reshape(3, 4).t()
    copy_pairs(tensor_pairs([one], [other]))
    assert torch.equal(one, other)
