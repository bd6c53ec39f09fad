"""DeepSeek-V4 as it is published: an FP8 backbone with exponents as scales, experts in MXFP4, NVFP4 or FP8, and layers
that only drafts use. It computes what codes and scales stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.errors import UserError
from sglang.srt.model_loader.loader import load_model
from srt.layers.moe.expert_checkpoint import mxfp4_exponents

from .harness import TinyRunner, plan_for, random_tokens, save_tiny
from .quantized_checkpoints import Tensors, nvfp4_modelopt

BACKBONE = ("wq_a.", "wq_b.", "wkv.", "wo_a.", "wo_b.", "shared_experts.w")
"""Modules that published checkpoints have in FP8, but for those of compressors."""
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
NVFP4 = {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "kv_cache_quant_algo": None}
Write = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Tiny matrices are one block, but for long ones."""
    rows, cols = (-(-size // 128) for size in weight.shape)
    exponents = torch.empty(rows, cols, dtype=torch.float8_e8m0fnu)
    codes, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(rows):
        for j in range(cols):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = 2.0 ** torch.ceil(torch.log2(weight[block].abs().max() / 448))
            exponents[i, j] = scale
            codes[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            exact[block] = codes[block].float() * scale
    return {"weight": codes, "scale": exponents}, exact


FORMS: dict[str, tuple[Write, dict[str, Any], dict[str, Any]]] = {
    "Flash": (mxfp4_exponents, BLOCKS, {"expert_dtype": "fp4"}),
    "Flash-FP8": (blocks, BLOCKS, {"model_type": "deepseek_ref"}),
    "Flash-NVFP4": (nvfp4_modelopt, BLOCKS | NVFP4, {"expert_dtype": "fp4"}),
}


def write(form: str, source: Path, folder: Path) -> tuple[Path, Path]:
    """-> the checkpoint, and the same model with what its codes stand for."""
    experts, quantization, keys = FORMS[form]
    published, exact = {}, {}
    for name, tensor in safetensors.torch.load_file(source / "model.safetensors").items():
        if ".experts." in name or (any(module in name for module in BACKBONE) and "compressor" not in name):
            if ".experts." in name:
                tensor.view(-1)[0] = 1.0  # gate and up have one factor, as ModelOpt writes them
            tensors, exact[name] = (experts if ".experts." in name else blocks)(tensor)
            published |= {f"{name.removesuffix('weight')}{leaf}": value for leaf, value in tensors.items()}
        else:
            published[name] = exact[name] = tensor
    published |= {"mtp.0.e_proj.weight": torch.ones(3), "mtp.0.ffn.experts.0.w1.scale": torch.ones(3)}
    config = json.loads((source / "config.json").read_text())
    written = config | {"quantization_config": quantization} | keys
    for place, tensors, values in (("published", published, written), ("exact", exact, config)):
        (folder / place).mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, folder / place / "model.safetensors")
        (folder / place / "config.json").write_text(json.dumps(values))
    return folder / "published", folder / "exact"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    save_tiny("deepseek_v4", folder, head_dim=64, o_lora_rank=96, partial_rotary_factor=0.125)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_published_forms(form: str, source: Path, tmp_path: Path) -> None:
    published, exact = write(form, source, tmp_path)
    tokens, plan = random_tokens(40, seed=3), plan_for(published)
    runner = TinyRunner(plan)
    want = TinyRunner(plan_for(exact)).extend({1: tokens})[0]
    assert want.std() > 0.1
    torch.testing.assert_close(runner.extend({1: tokens})[0], want, rtol=0.0, atol=5e-4)
    allocated = sum(param.tensor.nbytes for param in runner.model.params.values())
    assert allocated == plan.weight_bytes(), "the plan counts other bytes than are allocated"


def test_scales_as_deepseek_v3_calls_them(source: Path, tmp_path: Path) -> None:
    published, exact = write("Flash-FP8", source, tmp_path)
    file = published / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    renamed = {
        f"{name}_inv" if name.endswith(".weight_scale") else name: tensor
        for name, tensor in ((name.replace(".scale", ".weight_scale"), tensor) for name, tensor in tensors.items())
    }
    safetensors.torch.save_file(renamed, file)
    tokens = random_tokens(20, seed=3)
    want = TinyRunner(plan_for(exact)).extend({1: tokens})[0]
    got = TinyRunner(plan_for(published)).extend({1: tokens})[0]
    torch.testing.assert_close(got, want, rtol=0.0, atol=5e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("layers.1.attn.compressor.ape", "layers.1.attn.indexer.compressor.wgate.weight", "layers.0.attn.attn_sink"),
        *("layers.2.hc_ffn_scale", "hc_head_fn", "layers.0.ffn.gate.tid2eid", "layers.3.ffn.gate.bias"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, source: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    del tensors[name]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(UserError, match=f"lacks weights of the model: {name}"):
        load_model(plan_for(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": None}, "'compress_ratios' is missing"),
        ({"compress_ratios": [0, 1, 4, 4, 4]}, "whole numbers above 1; got 1"),
        ({"o_groups": 3}, "'o_groups' 3 does not divide the 4 attention heads"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
    ],
)
def test_keys_that_are_refused(change: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        _ = plan_for(tmp_path).description
