"""The exporter: what it writes holds the reference's values, under the names that readers of the format expect."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from srt.configs.gguf_files import convert
from srt.models.harness import plan_for, save_tiny

from sglang.quantize import export
from sglang.quantize.__main__ import main
from sglang.quantize.formats import FORMATS
from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.layers.quantization.reference import Quantized, dequantize, quantize
from sglang.srt.model_loader.checkpoint import find_checkpoint
from sglang.srt.model_loader.loader import load_model

WEIGHTS = {
    "model.embed_tokens.weight": (64, 128),
    "model.norm.weight": (128,),
    "model.layers.0.self_attn.q_proj.weight": (256, 128),
    "model.layers.0.self_attn.k_proj.weight": (64, 128),
    "model.layers.0.self_attn.v_proj.weight": (64, 128),
    "model.layers.0.self_attn.o_proj.weight": (128, 256),
    "model.layers.0.mlp.gate.weight": (4, 128),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (192, 128),
    "model.layers.0.mlp.experts.0.up_proj.weight": (192, 128),
    "model.layers.0.mlp.experts.0.down_proj.weight": (128, 192),
    "model.layers.0.narrow_proj.weight": (128, 40),
    "lm_head.weight": (64, 128),
}
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator).bfloat16() for n, s in WEIGHTS.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(source: Path, scheme: str, *options: str) -> Path:
    target = source.parent / scheme
    assert main(["--model", str(source), "--scheme", scheme, "--output", str(target), *options]) == 0
    return target


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def read_back(tensors: dict[str, torch.Tensor], module: str, scheme_name: str) -> torch.Tensor:
    """The weight as a reader of the format would decode it."""
    own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
    scheme = SCHEMES[scheme_name]
    data = own["weight_packed"] if "weight_packed" in own else own["weight"]
    scale = own["weight_scale_inv"] if "weight_scale_inv" in own else own["weight_scale"]
    if data.dtype is torch.int32:
        nibbles = torch.stack([(data >> (4 * i)) & 15 for i in range(8)], -1).flatten(-2)
        assert list(own["weight_shape"]) == list(nibbles.shape)
        return (nibbles - 8).float() * scale.float().repeat_interleave(scheme.group[1], 1)
    if scheme.group == (1, 0):
        assert scale.shape == (data.shape[0], 1)
        return data.float() * scale
    return dequantize(Quantized(data, scale, own.get("weight_scale_2")), scheme)


@pytest.mark.parametrize("scheme", FORMATS)
def test_weights(source: Path, scheme: str) -> None:
    target = run(source, scheme)
    before, after = load(source), load(target)
    for module in (name.removesuffix(".weight") for name in WEIGHTS if "_proj" in name):
        weight = before[f"{module}.weight"]
        cols = SCHEMES[scheme].group[1]
        if weight.shape[1] % cols if cols and scheme != "fp8_block" else False:
            assert torch.equal(after[f"{module}.weight"], weight)
            continue
        if scheme != "nvfp4":
            expected = dequantize(quantize(weight, SCHEMES[scheme]), SCHEMES[scheme])
            assert torch.equal(read_back(after, module, scheme), expected), module
        error = (read_back(after, module, scheme) - weight.float()).norm() / weight.float().norm()
        assert error < {8: 0.04, 4: 0.13}[SCHEMES[scheme].bits], module
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(after[name], before[name])
    assert (target / "tokenizer.json").exists()
    assert (target / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_fused_modules_share_the_factor(source: Path) -> None:
    after = load(run(source, "nvfp4"))
    layer = "model.layers.0"
    qkv = [after[f"{layer}.self_attn.{p}_proj.weight_scale_2"].item() for p in "qkv"]
    assert len(set(qkv)) == 1
    gate, up, down = (after[f"{layer}.mlp.experts.0.{p}_proj.weight_scale_2"].item() for p in ("gate", "up", "down"))
    assert gate == up != down
    assert after[f"{layer}.self_attn.q_proj.input_scale"].item() == 2.0**-4


def test_input_scales(source: Path) -> None:
    scales = source.parent / "scales.json"
    scales.write_text(json.dumps({"model.layers.0.self_attn.o_proj": 0.25}))
    after = load(run(source, "nvfp4", "--input-scales", str(scales)))
    assert after["model.layers.0.self_attn.o_proj.input_scale"].item() == 0.25


def test_configurations(source: Path) -> None:
    fp8 = json.loads((run(source, "fp8_block") / "config.json").read_text())
    assert fp8["model_type"] == "qwen3_moe"
    assert fp8["quantization_config"]["weight_block_size"] == [128, 128]
    assert "model.layers.0.mlp.gate" in fp8["quantization_config"]["modules_to_not_convert"]
    int4 = json.loads((run(source, "int4_g32") / "config.json").read_text())["quantization_config"]
    assert int4["format"] == "pack-quantized" and int4["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "model.layers.0.narrow_proj" in int4["ignore"]
    nvfp4 = run(source, "nvfp4")
    assert "quantization_config" not in json.loads((nvfp4 / "config.json").read_text())
    stated = json.loads((nvfp4 / "hf_quant_config.json").read_text())["quantization"]
    assert stated["quant_algo"] == "NVFP4" and "lm_head" in stated["exclude_modules"]


def test_only_some_modules(source: Path) -> None:
    target = run(source, "int4_g32", "--include", "*.experts.*", "--ignore", "*.down_proj")
    names = set(load(target))
    assert "model.layers.0.mlp.experts.0.up_proj.weight_packed" in names
    assert {"model.layers.0.mlp.experts.0.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"} <= names


def test_shards(source: Path) -> None:
    target = run(source, "fp8_channel", "--shard-gb", "0.00005")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    tensors = load(target)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {p.name for p in target.glob("model*.safetensors*")} == {
        *index["weight_map"].values(), "model.safetensors.index.json",
    }  # fmt: skip
    assert "model.safetensors.index.json" not in {p.name for p in source.iterdir()}


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        ("config", [], "quantized already"),
        ("target", [], "is not empty"),
        ("", ["--include", "nothing"], "no weight that matches"),
        ("", ["--input-scales", "/no/such/file"], "--input-scales"),
        ("", ["--input-scales", sys.executable], "--input-scales"),
        ("", ["--shard-gb", "nan"], "--shard-gb must be from 1e-05 to 10,000; got nan"),
        ("", ["--shard-gb", "-1"], "--shard-gb must be"),
        ("weights", [], "safetensors"),
    ],
)
def test_refusals(
    source: Path, capsys: pytest.CaptureFixture[str], damage: str, options: list[str], message: str
) -> None:
    target = source.parent / "out"
    if damage == "config":
        (source / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}))
    if damage == "target":
        target.mkdir()
        (target / "precious").write_text("")
    if damage == "weights":
        (source / "model.safetensors").unlink()
    arguments = ["--model", str(source), "--scheme", "nvfp4", "--output", str(target), *options]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_gguf_file_is_quantized_from_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    save_tiny("llama_wide", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: "Q4_0" if "ffn" in name else "F32")
    out = run(file, "int8_channel")
    assert not (out / "gguf.index.json").exists()
    checkpoint = find_checkpoint(str(resolve_model_path(str(file))), torch.bfloat16)
    values = {name: opened.get_tensor(name) for name, _, opened in checkpoint.tensors()}
    after, scheme = load(out), SCHEMES["int8_channel"]
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        expected = dequantize(quantize(values[f"{module}.weight"], scheme), scheme)
        assert torch.equal(read_back(after, module, scheme.name), expected), module
    assert load_model(plan_for(out))


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), SafetensorError("device"), KeyboardInterrupt()]
)
def test_what_does_not_finish_leaves_nothing(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    target, written = source.parent / "out", []

    def save_file(*args: Any, **options: Any) -> None:
        if written:
            raise failure
        written.append(args)
        save(*args, **options)

    save = export.save_file
    monkeypatch.setattr(export, "save_file", save_file)
    arguments = ["--model", str(source), "--scheme", "nvfp4", "--output", str(target), "--shard-gb", "0.00005"]
    interrupted = isinstance(failure, KeyboardInterrupt)
    assert main(arguments) == (130 if interrupted else 2)
    said = capsys.readouterr().err
    assert (
        "interrupted; what was written" if interrupted else f"this did not finish, and {target} was removed"
    ) in said
    assert written and not target.exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file", "is a file; choose another"),
        ("file/below", "--output "),
        ("killed", "has only what an interrupted run left behind"),
        ("x" * 300, "File name too long"),
        ("", "--output is empty"),
    ],
)
def test_outputs_that_cannot_be(source: Path, capsys: pytest.CaptureFixture[str], output: str, message: str) -> None:
    (source.parent / "file").write_text("")
    (source.parent / "killed").mkdir()
    (source.parent / "killed/model-00000.safetensors.part").write_text("")
    path = str(source.parent / output) if output else ""
    assert main(["--model", str(source), "--scheme", "nvfp4", "--output", path]) == 2
    assert message in capsys.readouterr().err
