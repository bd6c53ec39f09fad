"""AWQ's scaling: the model computes what it did, and rounding costs its products less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantize.test_calibrate import save_tokenizer, write_prompts
from quantize.test_rounding import layer, output_error, products_of
from safetensors.torch import load_file, save_file
from srt.models.harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

from sglang.quantize.__main__ import main
from sglang.quantize.awq import best_scales, find_changes, find_links, norm_offset
from sglang.quantize.calibrate import calibrate
from sglang.quantize.rounding import fitted
from sglang.srt.configs.hf_config import read_config
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization.reference import quantize
from sglang.srt.model_loader.checkpoint import find_checkpoint

TOKENS = random_tokens(17, seed=3)


@pytest.mark.parametrize(("name", "of_nearest"), [("int4_g32", 0.65), ("int4_g128", 0.7), ("mxfp4", 0.95)])
def test_scaled_columns_lose_less_where_some_inputs_are_large(name: str, of_nearest: float) -> None:
    """Most of it is what scales of groups gain that are fitted by the same inputs."""
    weight, seen, others = layer()
    large = torch.ones(weight.shape[1])
    large[::48] = 12.0
    seen, others, scheme = seen * large, others * large, SCHEMES[name]
    products = products_of(seen)
    scales = best_scales([weight], products, scheme)
    scaled = fitted(weight * scales, scheme, squares=products.diagonal() / scales.square())
    error = output_error(scaled, name, weight * scales, others / scales)
    assert error < of_nearest * output_error(quantize(weight, scheme), name, weight, others)
    assert error < output_error(fitted(weight, scheme, squares=products.diagonal()), name, weight, others)


def test_inputs_of_one_size_need_no_scales() -> None:
    scales = best_scales([layer()[0]], 4 * torch.eye(384), SCHEMES["int4_g32"])
    assert torch.equal(scales, torch.ones(384))


@pytest.mark.parametrize(("kind", "links"), [("llama_wide", 3), ("gemma3", 3), ("qwen3_wide", 3)])
def test_scaling_alone_changes_no_output(kind: str, links: int, tmp_path: Path) -> None:
    """Of norms that add one to their weight too, and in layers with more norms."""
    model, scaled = tmp_path / "model", tmp_path / "scaled"
    hf = save_tiny(kind, model)
    save_tiny(kind, scaled)
    save_tokenizer(model)
    file = write_prompts(tmp_path / "prompts.txt", [random_tokens(40, seed) for seed in range(4)])
    products = calibrate(str(model), file, 1000, "cpu", products=True).products
    tensors = load_file(model / "model.safetensors")
    config = read_config(model)
    found = find_links(tensors, products)
    assert len(found) == links * config["num_hidden_layers"]
    offset = norm_offset(config["model_type"])
    changes = find_changes(found, find_checkpoint(str(model)), products, SCHEMES["int4_g32"], offset, "cpu")
    assert len(changes) == 8 * config["num_hidden_layers"]
    assert all(not torch.allclose(change.apply(tensors[name]), tensors[name]) for name, change in changes.items())
    save_file({name: changes[name].apply(t) if name in changes else t for name, t in tensors.items()},
              scaled / "model.safetensors", {"format": "pt"})  # fmt: skip
    got = torch.cat(TinyRunner(plan_for(scaled)).extend({1: TOKENS}))
    torch.testing.assert_close(got[-1], hf_logits(hf, TOKENS)[-1], rtol=0.0, atol=1e-4)


def test_an_exported_model_loses_less(tmp_path: Path) -> None:
    """What is written is AWQ's: a norm's weight is divided by what its readers' columns are multiplied by."""
    model = tmp_path / "model"
    hf = save_tiny("llama_wide", model)
    save_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if "layernorm" in name:  # as those of real models, a few dims of which are large
            tensor.mul_(torch.exp(1.5 * torch.randn(tensor.shape, generator=generator)))
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    hf.load_state_dict(tensors, strict=False)
    file = write_prompts(tmp_path / "prompts.txt", [random_tokens(60, seed) for seed in range(8)])
    want, errors = hf_logits(hf, TOKENS), {}
    for rounding in ("fitted", "awq", "awq-gptq"):
        target = tmp_path / rounding
        words = ["--model", str(model), "--scheme", "int4_g32", "--output", str(target), "--rounding", rounding]
        words += ["--calibrate", file, "--calibration-device", "cpu"] if rounding != "fitted" else []
        assert main(words) == 0
        got = torch.cat(TinyRunner(plan_for(target)).extend({1: TOKENS}))
        errors[rounding] = (got - want).norm().item()
    assert errors["awq"] < 0.9 * errors["fitted"] and errors["awq-gptq"] < 0.9 * errors["awq"]
    norm = "model.layers.0.input_layernorm.weight"
    written = load_file(tmp_path / "awq" / "model.safetensors")
    assert not torch.allclose(written[norm], tensors[norm]) and written[norm].dtype == tensors[norm].dtype


@pytest.mark.parametrize(
    ("kind", "scheme", "message"),
    [
        ("qwen3_moe_wide", "int4_g32", "awq is for models of the types llama,"),
        ("llama_wide", "nvfp4", "awq is for schemes with 16-bit activations, not for nvfp4"),
    ],
)
def test_refusals(kind: str, scheme: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(kind, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--scheme", scheme, "--output", str(tmp_path / "out")]
    words += ["--rounding", "awq", "--calibrate", write_prompts(tmp_path / "p.txt", [[5, 6]])]
    assert main([*words, "--calibration-device", "cpu"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
