"""Kimi Linear quantized, as its names are published: FP8 blocks and NVFP4, of two exporters each, against transformers
with the weights that the checkpoint stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.kimi_delta.layer import KimiDeltaAttention, LowRank
from sglang.srt.layers.quantization.dense import QuantizedLinear

from .harness import TinyRunner, blocks_of, plan_for, save_tiny
from .quantized_checkpoints import FORMS, Form, Tensors, write_model
from .ranks_alike import assert_ranks_alike
from .test_quantized_hybrids import TOLERANCE, steps, wanted

EXPERTS = r".*block_sparse_moe\.experts\.\d+\.w[123]"
MLPS = r".*(mlp|shared_experts)\.(gate|up|down)_proj"
KDA = r".*layers\.[02]\.self_attn\.(q|k|v|o|f_a|f_b|g_a|g_b)_proj"
BETA = r".*layers\.[02]\.self_attn\.b_proj"
LATENT = r".*layers\.1\.self_attn\.(q_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
NOT_LINEAR = ("lm_head", "block_sparse_moe.gate")


@dataclass(frozen=True)
class Stored:
    """`modules` are written as `form` says, the others are named in its list of exceptions."""

    form: Form
    modules: tuple[str, ...]
    kept: tuple[str, ...]


def _with_kept(form: Form, kept: tuple[str, ...]) -> Form:
    if form.modelopt:
        inner = dict(form.modelopt["quantization"]) | {"exclude_modules": [*kept]}
        return replace(form, modelopt={**form.modelopt, "quantization": inner})
    key = "ignore" if form.config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    return replace(form, config=dict(form.config) | {key: [*kept]})


CASES = {
    # All linear layers, and with the little projection of beta left alone.
    "FP8 blocks": Stored(FORMS["fp8_block"], (EXPERTS, MLPS, KDA, BETA, LATENT), NOT_LINEAR),
    "FP8 blocks, some kept": Stored(
        FORMS["fp8_block"], (EXPERTS, MLPS, LATENT), (*NOT_LINEAR, "layers.0.self_attn", "layers.2.self_attn")
    ),
    "FP8 blocks of compressed-tensors": Stored(
        FORMS["compressed_fp8_block"],
        (EXPERTS, MLPS, KDA, LATENT),
        ("lm_head", r"re:.*block_sparse_moe\.gate$", r"re:.*\.b_proj$"),
    ),
    "NVFP4 of ModelOpt": Stored(
        FORMS["modelopt_nvfp4"],
        (EXPERTS, MLPS),
        ("lm_head", "*block_sparse_moe.gate", "*self_attn*"),
    ),
    "NVFP4 of compressed-tensors": Stored(
        FORMS["compressed_nvfp4"],
        (EXPERTS, MLPS, KDA, BETA, LATENT),
        ("lm_head", r"re:.*block_sparse_moe\.gate$"),
    ),
}


def save_stored(case: Stored, folder: Path, **more: int) -> Path:
    """Writes the checkpoint to folder/quantized; returns where the same model in fp32 is. `more`: as of `save_tiny`."""
    save_tiny("kimi_linear_wide", folder / "reference", **more)
    tensors = load_file(folder / "reference" / "model.safetensors")
    stored: Tensors = {}
    for key, tensor in list(tensors.items()):
        module, _, leaf = key.rpartition(".")
        if leaf != "weight" or not any(re.fullmatch(pattern, module) for pattern in case.modules):
            stored[key] = tensor
            continue
        written, tensors[key] = case.form.write(tensor)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in written.items()}
    for pattern in case.modules:
        assert any(re.fullmatch(f"{pattern}\\.weight(_packed)?", name) for name in stored), "it matches nothing"
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    write_model(folder, stored, _with_kept(case.form, case.kept))
    return folder / "reference"


@pytest.mark.parametrize("name", CASES)
def test_a_stored_form_computes_what_it_stands_for(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    reference = save_stored(case, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner, want = TinyRunner(plan), wanted(reference)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    mixer, _ = blocks_of(runner.model.layers[0])
    assert isinstance(mixer, KimiDeltaAttention)
    low_rank = mixer.decays_and_gates
    assert isinstance(low_rank, LowRank)
    for linear in (mixer.in_proj, low_rank.low, low_rank.decay, low_rank.gate, mixer.out):
        assert isinstance(linear.apply, QuantizedLinear) == (KDA in case.modules)
    assert not isinstance(mixer.beta.apply, QuantizedLinear), "it is too little"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["FP8 blocks", "NVFP4 of compressed-tensors"])
def test_two_ranks_share_heads_and_experts(name: str, tmp_path: Path) -> None:
    """A rank's two heads of beta end within the block that all four share."""
    case = CASES[name]
    save_stored(case, tmp_path, moe_intermediate_size=256)
    assert_ranks_alike(2, steps, TOLERANCE, tmp_path)
