"""16-bit checkpoints with --quantization fp8: every family's projections, in the forms that they are published in."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.configs.quantization import online_fp8
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization import reference
from sglang.srt.plan.rank_weights import expert_rows
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.served_model import describe_served
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.server_args import ServerArgs

from .harness import SIZES, TINY, TinyRunner, plan_for, save_tiny
from .test_hybrid import multimodal
from .test_quantized import TOLERANCE, steps

QUANTIZED = re.compile(
    r".*(\b(q|k|v|o|gate|up|down|gate_up|in|out)_proj|in_proj_(qkv|z)|fc[12]_latent_proj)(\.weight)?"
)
WIDE = {
    "moe.router",
    "moe.shared_gate",
    "attn.head_gate",
    "attn.index_weights",
    "attn.index_pool",
    "gdn.in_gates",
    "kda.beta",
    "inputs.gate",
    "inputs.projection",
    "ngrams.project",
}
"""Of the matrices of a layer those that stay in 16 bits: small ones, and the product behind a table of n-grams, of one
layer."""


def original(name: str, folder: Path) -> Path:
    """In 16 bits, as published: Gemma 4's and Qwen3.5's experts are one tensor."""
    save_tiny(name, folder / "text")
    if name != "qwen3_5_moe":
        return folder / "text"
    (folder / "both").mkdir()
    multimodal(name, folder / "text", folder / "both")
    return folder / "both"


def rounded(source: Path, folder: Path) -> Path:
    """The same with the weights that the codes stand for."""
    shutil.copytree(source, folder)
    tensors, scheme = load_file(source / "model.safetensors"), SCHEMES["fp8_channel"]
    for key, tensor in tensors.items():
        if QUANTIZED.fullmatch(key):
            tensors[key] = reference.dequantize(reference.quantize(tensor, scheme), scheme)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_latent", "gemma4_moe", "qwen3_5_moe"])
def test_what_is_computed(name: str, tmp_path: Path) -> None:
    source = original(name, tmp_path)
    plan = plan_for(source, quantization="fp8")
    runner = TinyRunner(plan)
    want = TinyRunner(plan_for(rounded(source, tmp_path / "rounded")))
    torch.testing.assert_close(steps(runner), steps(want), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    """No kernel takes them in FP8."""
    save_tiny("gpt_oss", tmp_path)
    with pytest.raises(UserError, match="experts with a bias cannot be quantized while loading; remove --quantization"):
        TinyRunner(plan_for(tmp_path, quantization="fp8"))


def matrices_in_fp8(name: str) -> set[tuple[str, bool]]:
    """Returns the names of the matrices of all layers, and whether these are quantized."""
    class_name, changes = TINY[name]
    values = copy.deepcopy(SIZES | changes)  # some of these classes write into what they are given
    config = json.loads(getattr(transformers, class_name)(**values).to_json_string(use_diff=False))
    config["architectures"] = [class_name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    model = describe_served(ServerArgs(model_path="x"), config, online_fp8("fp8"), "", "x")
    return {
        (weight.name, model.quant_of(i, weight) is not None)
        for i, layer in enumerate(model.layers)
        for weight in layer.weights(model.hidden_size, ONE_RANK, expert_rows(model, ONE_RANK, layer.ffn.experts))
        if isinstance(weight, Matrix)
    }


WRITTEN_OTHERWISE = ("deepseek_v4", "step3p7", "inkling", "nemotron_h_puzzle")


@pytest.mark.parametrize("name", [name for name in TINY if not name.startswith(WRITTEN_OTHERWISE)])
def test_every_large_matrix_is_quantized(name: str) -> None:
    """Of the others transformers writes keys that no published config.json has."""
    assert {matrix for matrix, quantized in matrices_in_fp8(name) if not quantized} <= WIDE


def test_of_inkling_the_experts_alone_are_quantized() -> None:
    quantized = {matrix for matrix, is_quantized in matrices_in_fp8("inkling") if is_quantized}
    assert quantized == {"moe.w13", "moe.w2"}
