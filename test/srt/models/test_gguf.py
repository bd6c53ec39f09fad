"""Models in GGUF are those from which the files were made: the same description, the same weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang.srt.configs.model_path import resolve_model_path
from sglang.srt.errors import UserError
from sglang.srt.model_loader.checkpoint import find_checkpoint
from sglang.srt.model_loader.loader import filled_model

from ..configs.gguf_files import add_tensor, convert, write
from .harness import LLAMA3_ROPE, TinyRunner, plan_for, random_tokens, save_tiny

GREEDY = {"topk_method": "greedy", "n_group": None, "topk_group": None}
SAME_MSCALE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 1, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma3": ("gemma3_capped", {"query_pre_attn_scalar": 32}),
    "gpt_oss": ("gpt_oss", {}),
    "glm4": ("glm4", {}),
    "deepseek_v2": ("deepseek_v2_lite", {"rope_parameters": SAME_MSCALE}),
    "deepseek_v3": ("deepseek_v3", {"num_nextn_predict_layers": 0, "rope_parameters": SAME_MSCALE}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_it_was_made_of(family: str, tmp_path: Path) -> None:
    name, more = FAMILIES[family]
    save_tiny(name, tmp_path / "saved", **more)
    file = convert(tmp_path / "saved", tmp_path / "model.gguf")
    want, got = plan_for(tmp_path / "saved", dtype="float32"), plan_for(file, dtype="float32")
    assert replace(got.description, dtype="float32") == want.description  # a file does not say what it was trained in
    made, loaded = filled_model(want), filled_model(got)
    assert loaded.params.keys() == made.params.keys()
    for param in made.params:
        assert torch.equal(loaded.params[param].tensor, made.params[param].tensor), param


def test_a_tensor_for_each_expert_is_refused(tmp_path: Path) -> None:
    def of_2023(writer: Any) -> None:
        writer.add_expert_count(4)
        add_tensor(writer, "blk.0.ffn_up.0.weight", torch.zeros(32, 32), "F32")

    with pytest.raises(UserError, match="a tensor for each expert, as files of 2023 have it, is not read"):
        resolve_model_path(str(write(tmp_path / "model.gguf", of_2023)))


@pytest.mark.parametrize("family", ["llama tied", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma3"])
def test_transformers_reads_the_same_tensors(family: str, tmp_path: Path) -> None:
    name, more = FAMILIES[family]
    model = save_tiny(name, tmp_path / "saved", **more)
    file = convert(tmp_path / "saved", tmp_path / "model.gguf")
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = find_checkpoint(str(resolve_model_path(str(file))))
    ours = {name: opened.get_tensor(name) for name, _, opened in checkpoint.tensors()}
    common = theirs.keys() & ours.keys()  # they stack experts
    assert len(common) > 20
    for name in common:
        assert torch.equal(ours[name], theirs[name].float()), name


def _as_16_bits(file: Path, saved: Path, folder: Path) -> None:
    """Writes the file's weights, dequantized, as a checkpoint of safetensors."""
    made = resolve_model_path(str(file))
    checkpoint = find_checkpoint(str(made))
    tensors = {name: opened.get_tensor(name).contiguous().clone() for name, _, opened in checkpoint.tensors()}
    shutil.copytree(saved, folder)
    save_file(tensors, folder / "model.safetensors")


SCHEMES = {"Q4_0": "int4_g32", "Q8_0": "int8_g32", "MXFP4": "mxfp4"}
KEPT = {
    "llama, Q4_0": ("llama_wide", "Q4_0"),
    "qwen3_moe, Q4_0": ("qwen3_moe_wide", "Q4_0"),
    "qwen3_moe, MXFP4": ("qwen3_moe_wide", "MXFP4"),
    "llama, Q8_0": ("llama_wide", "Q8_0"),
    "mixtral, Q8_0": ("mixtral", "Q8_0"),
    "qwen3_moe, Q8_0": ("qwen3_moe_wide", "Q8_0"),
    "deepseek_v3, Q8_0": ("deepseek_v3", "Q8_0"),
    "gemma3, Q4_0": ("gemma3", "Q4_0"),
    "glm4, Q4_0": ("glm4", "Q4_0"),
    "qwen2_moe, Q4_0": ("qwen2_moe", "Q4_0"),
    "gpt_oss, MXFP4": ("gpt_oss_wide", "MXFP4"),
    "deepseek_v3, Q4_0": ("deepseek_v3", "Q4_0"),
}


@pytest.mark.parametrize("case", KEPT)
def test_weights_that_stay_in_four_bits_answer_as_those_in_16(case: str, tmp_path: Path) -> None:
    family, kind = KEPT[case]
    family, more = FAMILIES.get(family, (family, {}))
    save_tiny(family, tmp_path / "saved", **more)
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: kind if _is_product(name) else "F32")
    plan = plan_for(file, dtype="float32")
    assert plan.model.quantization is not None
    assert plan.model.quantization.schemes() == {SCHEMES[kind]}
    _as_16_bits(file, tmp_path / "saved", tmp_path / "wide")
    tokens = random_tokens(12, seed=1)
    got = TinyRunner(plan).extend({0: tokens})[0]
    want = TinyRunner(plan_for(tmp_path / "wide", dtype="float32")).extend({0: tokens})[0]
    assert (got - want).norm() < 1e-4 * want.norm()


def test_a_file_in_four_bits_may_be_quantized_anew(tmp_path: Path) -> None:
    save_tiny("llama_wide", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: "Q4_0" if _is_product(name) else "F32")
    plan = plan_for(file, dtype="float32", quantization="fp8")
    assert plan.model.quantization is not None
    assert plan.model.quantization.schemes() == {"fp8_channel"}
    _as_16_bits(file, tmp_path / "saved", tmp_path / "wide")
    got = filled_model(plan)
    want = filled_model(plan_for(tmp_path / "wide", dtype="float32", quantization="fp8"))
    for name, param in want.params.items():
        assert torch.equal(got.params[name].tensor, param.tensor), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_flag_of_upstream_names_what_is_there(kind: str, tmp_path: Path) -> None:
    save_tiny("llama_wide", tmp_path / "saved")
    file = convert(tmp_path / "saved", tmp_path / "model.gguf", lambda name: kind if _is_product(name) else "F32")
    quantization = plan_for(file, quantization="gguf", load_format="gguf").model.quantization
    assert (quantization is None) == (kind == "Q4_1")
    with pytest.raises(UserError, match="--quantization gguf, but the checkpoint .* is not quantized"):
        plan_for(tmp_path / "saved", quantization="gguf")
    with pytest.raises(UserError, match="--quantization awq"):
        plan_for(file, quantization="awq")


def test_modules_of_one_product_may_have_several_types(tmp_path: Path) -> None:
    save_tiny("llama_wide", tmp_path / "saved")

    def mixed(name: str) -> str:
        if not _is_product(name):
            return "F32"
        return "Q5_0" if "attn_v" in name or "ffn_down" in name else "Q4_0"

    file = convert(tmp_path / "saved", tmp_path / "model.gguf", mixed)
    _as_16_bits(file, tmp_path / "saved", tmp_path / "wide")
    tokens = random_tokens(12, seed=1)
    got = TinyRunner(plan_for(file, dtype="float32")).extend({0: tokens})[0]
    want = TinyRunner(plan_for(tmp_path / "wide", dtype="float32")).extend({0: tokens})[0]
    assert (got - want).norm() < 1e-4 * want.norm()


def test_parameters_of_sampling_come_with_the_file(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "saved")

    def recommend(writer: Any) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_penalty_repeat(1.05)

    model = plan_for(convert(tmp_path / "saved", tmp_path / "model.gguf", more=recommend)).model
    assert model.default_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def test_llama_3_is_scaled_as_its_table_says(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "saved", rope_parameters=LLAMA3_ROPE)

    def add_table(writer: Any) -> None:
        divisors = _frequencies({"rope_type": "default"}) / _frequencies(LLAMA3_ROPE)
        add_tensor(writer, "rope_freqs.weight", divisors, "F32")

    file = convert(tmp_path / "saved", tmp_path / "model.gguf", more=add_table)
    want, got = plan_for(tmp_path / "saved", dtype="float32"), plan_for(file, dtype="float32")
    assert replace(got.description, dtype="float32") == want.description

    file = convert(
        tmp_path / "saved",
        tmp_path / "other.gguf",
        more=lambda writer: add_tensor(writer, "rope_freqs.weight", torch.linspace(1, 3, 8), "F32"),
    )
    with pytest.raises(UserError, match="rope_freqs.weight is not the table of a Llama 3"):
        plan_for(file)

    save_tiny("qwen3", tmp_path / "qwen3")
    file = convert(
        tmp_path / "qwen3",
        tmp_path / "qwen3.gguf",
        more=lambda writer: add_tensor(writer, "rope_freqs.weight", torch.ones(16), "F32"),
    )
    with pytest.raises(UserError, match="no layer of qwen3 has the tensor rope_freqs.weight"):
        plan_for(file)


def _frequencies(rope: dict[str, Any]) -> torch.Tensor:
    """Those of transformers, for heads of 16."""
    rope = {"rope_theta": 10000.0, **rope}
    config = transformers.LlamaConfig(head_dim=16, max_position_embeddings=256, rope_parameters=rope)
    return LlamaRotaryEmbedding(config).inv_freq


def _is_product(name: str) -> bool:
    """Tensors that quantizers of such files leave alone: norms, biases, routers."""
    return name.endswith(".weight") and not any(word in name for word in ("norm", "inp", "sinks", "token_embd"))
