"""Calibrated scales of the KV cache: those of transformers' own keys and values, in a file and in checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantize.test_calibrate import save_tokenizer, write_prompts
from safetensors.torch import load_file, save_file
from srt.models.harness import TinyRunner, plan_for, random_tokens, save_tiny

from sglang.quantize import cache_scales, samples
from sglang.quantize.__main__ import main
from sglang.srt.errors import UserError
from sglang.srt.plan.cache_scales import read_cache_scales

SMALL = 2.0**-14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose values are so small that e4m3 has no digits of them; the output projection makes up for it."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny("qwen3_wide", folder)
    save_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensors[name] = tensor * SMALL
        elif name.endswith("o_proj.weight"):
            tensors[name] = tensor / SMALL
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(model: Path, folder: Path, *more: str) -> dict[str, Any]:
    prompts = write_prompts(folder / "prompts.txt", [random_tokens(30, seed) for seed in range(3)])
    file = folder / "scales.json"
    flags = ["--model", str(model), "--kv-cache-scales", str(file), "--calibrate", prompts, *more]
    assert main([*flags, "--calibration-device", "cpu"]) == 0
    cache: dict[str, Any] = json.loads(file.read_text())["kv_cache"]
    return cache


def steps(runner: TinyRunner) -> torch.Tensor:
    ids = random_tokens(12, 7)
    return torch.cat([*runner.extend({0: ids}), *(runner.decode({0: token}) for token in ids[:3])])


def test_a_file_by_layer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = measure(model, tmp_path)
    scales = read_cache_scales(str(tmp_path / "scales.json"), {"qwen3"}).layers
    assert sorted(scales) == [0, 1, 2] and set(cache["scaling_factor"]) == {"0"}
    for layer, both in cache["scaling_factor"]["0"].items():
        k, v = cache["k_scale"][layer], cache["v_scale"][layer]
        assert both == max(k, v) and v < SMALL < k and scales[int(layer)].v == v
        assert torch.tensor([k, v]).log2().frac().eq(0).all(), "powers of two"
    said = capsys.readouterr().out
    keys, values = (part.strip().splitlines() for part in said.partition("keys\n")[2].split("values\n"))
    assert len(keys) == 5 and len(values) == 6 and "serve with --kv-cache-dtype fp8_e4m3" in values[-1]
    without, by_layer, by_head = (float(error.split()[-1].rstrip("%")) for error in values[4].split(","))
    assert without > 90 and by_layer < 4 and by_head < 4

    plain = plan_for(model, kv_cache_dtype="fp8_e4m3")
    exact, lost = (steps(TinyRunner(plan)) for plan in (plan_for(model), plain))
    given = steps(TinyRunner(replace(plain, cache_scales=read_cache_scales(str(tmp_path / "scales.json"), ()))))
    assert (given - exact).norm() < 0.1 * exact.norm() < 2 * (lost - exact).norm()


def test_a_file_by_head(model: Path, tmp_path: Path) -> None:
    cache = measure(model, tmp_path, "--kv-cache-scales-by", "head", "--calibration-tokens", "30")
    for layer, heads in cache["k_scale"].items():
        assert len(heads) == 2 and max(heads) == cache["scaling_factor"]["0"][layer]


@pytest.mark.parametrize(("scheme", "by"), [("fp8_channel", "head"), ("fp8_tensor", "layer")])
def test_scales_in_a_checkpoint(scheme: str, by: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cache = measure(model, tmp_path, "--scheme", scheme, "--output", str(out), "--kv-cache-scales-by", by)
    plan = plan_for(out)
    assert plan.kv_cache_dtype == "fp8_e4m3", "the checkpoint states it"
    for cache_of, layer in zip(TinyRunner(plan).model.caches, ("0", "1", "2"), strict=True):
        heads = cache["k_scale"][layer]
        assert cache_of.k_scale == (max(heads) if by == "head" else heads) and cache_of.v_scale < SMALL


def test_latents_have_one_scale(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    cache = measure(tmp_path / "model", tmp_path)
    assert "v_scale" not in cache and cache["k_scale"] == cache["scaling_factor"]["0"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--scheme SCHEME with --output DIR, or --kv-cache-scales FILE"),
        (["--kv-cache-scales-by", "head"], "--kv-cache-scales-by has no effect"),
        (["--kv-cache-scales", "x.json"], "--kv-cache-scales needs --calibrate FILE"),
        (["--kv-cache-scales", "/no/where/x.json", "--calibrate", "x"], "name a file in a directory that exists"),
        (["--kv-cache-scales", "x.json", "--calibrate", "x", "--output", "y"], "--scheme and --output go together"),
    ],
)
def test_options_that_do_not_fit(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "x", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("prompts", "no/such/file"),
        ("class", "writes no scales into a checkpoint that a class of transformers computes"),
        ("layers", "no layer of Some takes scales"),
        ("device", "cannot: too small"),
    ],
)
def test_what_is_refused_before_a_weight_is_quantized(
    change: str, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def plan(args: Any) -> Any:
        if change == "device":
            raise UserError("too small")
        return SimpleNamespace(description=SimpleNamespace(transformers_class="X", title="Some"))

    if change != "prompts":
        monkeypatch.setattr(samples, "create_plan", plan)
        monkeypatch.setattr(cache_scales, "scaled_layers", lambda description: {0} if change == "class" else set())
    prompts = write_prompts(tmp_path / "prompts.txt", [random_tokens(30, 1)])
    out = tmp_path / "out"
    flags = ["--scheme", "fp8_block", "--output", str(out), "--kv-cache-scales", str(tmp_path / "x.json")]
    calibrate = "no/such/file" if change == "prompts" else prompts
    assert main(["--model", str(model), *flags, "--calibrate", calibrate, "--calibration-device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
