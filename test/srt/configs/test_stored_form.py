"""What the tensors of a checkpoint say of its quantization, by names alone and by types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang.srt.configs import checkpoint_header
from sglang.srt.configs.quant_formats import read_compressed_tensors, read_fp8
from sglang.srt.configs.quant_rules import ModuleQuant, QuantConfig, without_decoder
from sglang.srt.configs.stored_form import STACKED_FP8, as_stored, stored_wide, with_stacked_experts
from sglang.srt.errors import UserError

BLOCK = ModuleQuant("fp8_block", "fp8")
FP8 = read_fp8({"weight_block_size": [128, 128], "modules_to_not_convert": ["layers.1.mlp.experts"]}, "config.json")
LAYER = "model.language_model.layers."
TYPES = {
    f"{LAYER}0.linear_attn.in_proj_qkvz.weight": "BF16",
    f"{LAYER}0.linear_attn.out_proj.weight": "F8_E4M3",
    f"{LAYER}0.linear_attn.out_proj.weight_scale_inv": "F32",
    f"{LAYER}0.mlp.experts.0.up_proj.weight": "BF16",
    f"{LAYER}0.mlp.experts.1.up_proj.weight": "BF16",
    f"{LAYER}2.mlp.experts.0.up_proj.weight": "BF16",
    f"{LAYER}2.mlp.experts.1.up_proj.weight": "F8_E4M3",
    f"{LAYER}2.mlp.experts.1.up_proj.weight_scale_inv": "F32",
    f"{LAYER}3.mlp.experts.gate_up_proj": "F8_E4M3",
    f"{LAYER}3.mlp.experts.gate_up_proj_scale_inv": "F32",
    f"{LAYER}4.mlp.experts.gate_up_proj": "BF16",
    f"{LAYER}4.self_attn.k_proj.weight": "BF16",
    f"{LAYER}4.self_attn.k_proj.k_scale": "F32",
    "lm_head.weight": "BF16",
}
WIDE = {
    "model.layers.0.linear_attn.in_proj_qkvz": True,
    "layers.0.linear_attn.out_proj": False,
    "language_model.model.layers.0.mlp.experts.9.gate_proj": True,  # as the others of its layer
    "layers.2.mlp.experts.0.up_proj": True,
    "layers.2.mlp.experts.1.up_proj": False,
    "layers.2.mlp.experts.9.up_proj": False,
    "layers.3.mlp.experts": False,
    "layers.4.mlp.experts": True,
    "layers.4.self_attn.k_proj": True,
    "layers.4.self_attn.q_proj": False,
    "mtp.layers.0.linear_attn.in_proj_qkvz": False,
}


def test_weights_without_scales_are_in_16_bits() -> None:
    config = stored_wide(FP8, TYPES)
    assert config is not None
    assert {name: config.of(name) is None for name in WIDE} == WIDE


def test_a_checkpoint_in_16_bits_that_says_otherwise_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(2, 2)
    tensors = {f"{LAYER}0.mlp.up_proj.weight": weight.bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = as_stored(FP8, tmp_path)
    assert config is not None and config.of("layers.0.mlp.up_proj") is None
    assert "none has scales" in caplog.text
    caplog.clear()
    scaled = {f"{LAYER}0.mlp.up_proj.weight": weight.to(torch.float8_e4m3fn)}
    save_file(scaled | {f"{LAYER}0.mlp.up_proj.weight_scale_inv": weight}, tmp_path / "model.safetensors")
    assert as_stored(FP8, tmp_path) and not caplog.text


def test_types_are_read_where_names_do_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two files only the one whose tensors are unclear is opened."""
    dtypes = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    clear = [name for name in TYPES if ".out_proj." in name or "scale" in name]
    places = {name: "a.safetensors" if name in clear else "b.safetensors" for name in TYPES}
    for file in ("a.safetensors", "b.safetensors"):
        tensors = {name: torch.zeros(1, dtype=dtypes[TYPES[name]]) for name in TYPES if places[name] == file}
        save_file(tensors, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    opened: list[str] = []
    header = checkpoint_header.file_tensors
    monkeypatch.setattr(checkpoint_header, "file_tensors", lambda path: opened.append(path.name) or header(path))
    config = as_stored(FP8, tmp_path)
    assert config is not None and opened == ["b.safetensors"]
    assert {name: config.of(name) is None for name in WIDE} == WIDE
    opened.clear()
    ignored = read_fp8({"weight_block_size": [128, 128], "modules_to_not_convert": ["model", "lm_head"]}, "config.json")
    assert as_stored(ignored, tmp_path) is not None and opened == []


def test_names_without_the_decoder() -> None:
    for name in ("layers.0.mlp", "model.layers.0.mlp", "model.language_model.layers.0.mlp"):
        assert without_decoder(name) == "layers.0.mlp"
    assert without_decoder("language_model.model.layers.0.mlp") == "layers.0.mlp"
    assert without_decoder("mtp.layers.0.mlp") == "mtp.layers.0.mlp"


def test_experts_in_one_tensor() -> None:
    config = with_stacked_experts(FP8, TYPES)
    assert config is not None
    assert config.of("model.layers.3.mlp.experts.0.up_proj") == ModuleQuant("fp8_block", STACKED_FP8)
    assert config.of("model.layers.3.mlp.shared_experts.up_proj") == BLOCK
    assert config.of("model.layers.3.self_attn.o_proj") == BLOCK
    assert config.of("model.layers.1.mlp.experts") is None
    assert with_stacked_experts(FP8, {}) == FP8 and with_stacked_experts(None, TYPES) is None


def test_an_output_head_that_a_rule_names(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["lm_head"], "weights": weights, "input_activations": None}}
    config = read_compressed_tensors({"config_groups": groups, "format": "nvfp4-pack-quantized"}, "config.json")
    assert config.named("lm_head") == ModuleQuant("nvfp4_a16", "compressed-tensors")
    index = tmp_path / "model.safetensors.index.json"
    save_file({"lm_head.weight": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    found = as_stored(config, tmp_path)
    assert isinstance(found, QuantConfig) and found.named("lm_head") is None
    index.write_text("[]")
    with pytest.raises(UserError, match="is no index of weights"):
        as_stored(config, tmp_path)
    index.unlink()
    assert as_stored(config, tmp_path) == config
