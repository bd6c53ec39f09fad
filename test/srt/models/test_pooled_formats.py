"""Qwen3.8-Flash-Next as it is published: names of a multimodal checkpoint, experts in FP8 blocks and NVFP4, tables of
n-grams in FP8 with one scale, each against transformers with the weights that the checkpoint stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.errors import UserError

from .harness import TinyRunner, plan_for, save_tiny
from .ranks_alike import assert_ranks_alike
from .test_hybrid import multimodal
from .test_quantized_hybrids import ATTENTION, EXPERTS, TOLERANCE, Published, publish, steps, wanted

TABLE = "ple.ple_embedding.ngram_embedding"
LAYER = "model.language_model.layers.1."
FP8_TABLE = {"ple_embedding_dtype": "float8_e4m3fn"}


def fp8_experts(modules: dict[str, str]) -> dict[str, Any]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "self_attn", "linear_attn", "ple", "mlp.gate", "mlp.shared_expert"]
        + ["attn_hyper_connection", "mlp_hyper_connection", "hyper_connection_mixer", "visual", "mtp"],
    }


def nvfp4_experts(modules: dict[str, str]) -> dict[str, Any]:
    excluded = ["lm_head", "*self_attn*", "*linear_attn*", "*.ple.*", "*.mlp.gate", "*shared_expert*", "mtp*"]
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": [*excluded, "*hyper_connection*", "*visual*"]}
    return {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": inner}


def mixed(modules: dict[str, str]) -> dict[str, Any]:
    """The table of n-grams is in the list of modules, as each of its pieces is."""
    layers = {
        name: {"quant_algo": way} | ({"group_size": 16} if way == "NVFP4" else {}) for name, way in modules.items()
    }
    layers |= {f"{LAYER}{TABLE}.shard_{i}": {"quant_algo": "FP8"} for i in range(4)}
    return {"quantized_layers": layers, "quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "ignore": ["mtp*"]}


def auto_round_experts(modules: dict[str, str]) -> dict[str, Any]:
    """Whatever is not in the blocks is in 16 bits, and of these what is listed: gates by the fused name, too."""
    wide = {"bits": 16, "data_type": "float"}
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.language_model.layers",
        "extra_config": dict.fromkeys((r".*self_attn.*", r".*linear_attn\..*", ".*in_proj_ba.*"), wide),
    }


FORMS = {
    "AutoRound": Published("qwen4_exp_wide", ((EXPERTS, "GPTQ"),), auto_round_experts, wrapped=True),
    "FP8": Published("qwen4_exp_wide", ((EXPERTS, "blocks"),), fp8_experts, wrapped=True),
    "NVFP4": Published("qwen4_exp_wide", ((EXPERTS, "NVFP4"),), nvfp4_experts, own_file=True, wrapped=True),
    "mixed": Published("qwen4_exp", ((EXPERTS, "NVFP4"), (ATTENTION, "FP8")), mixed, wrapped=True),
}


def in_fp8(folder: Path) -> None:
    """Stores the table of the checkpoint that `publish` has written in e4m3 with one scale, and the numbers of its hash
    beside it; the reference gets what that stands for."""
    reference, quantized = (folder / name / "model.safetensors" for name in ("reference", "quantized"))
    wide, stored = load_file(reference), load_file(quantized)
    scale = torch.tensor([0.02]).bfloat16()
    for key in [key for key in stored if TABLE in key]:
        stored[key] = (stored[key] / scale).to(torch.float8_e4m3fn)
        wide[key.replace("model.language_model.", "model.")] = stored[key].float() * scale
    stored[f"{LAYER}{TABLE}.weight_scale"] = scale
    spec = table_of(folder / "quantized")
    places = [sum(spec.head_rows[:i]) for i in range(spec.num_heads)]
    stored[f"{LAYER}ple.ple_embedding.layer_multipliers"] = torch.tensor(spec.multipliers)
    stored[f"{LAYER}ple.ple_embedding.ngram_heads_vocab_sizes"] = torch.tensor(spec.head_rows)
    stored[f"{LAYER}ple.ple_embedding.ngram_heads_offsets"] = torch.tensor(places)
    save_file({key: tensor.contiguous() for key, tensor in wide.items()}, reference, {"format": "pt"})
    save_file(stored, quantized)


def table_of(folder: Path) -> NgramEmbedding:
    table = plan_for(folder).description.layers[1].ngrams
    assert isinstance(table, NgramEmbedding)
    return table


@pytest.fixture(scope="module", params=FORMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    publish(FORMS[request.param], folder)
    in_fp8(folder)
    return folder


def test_a_published_form_computes_what_it_stands_for(checkpoint: Path) -> None:
    plan = plan_for(checkpoint / "quantized")
    assert table_of(checkpoint / "quantized").table_dtype == "fp8_e4m3", "the files say so"
    runner, want = TinyRunner(plan), wanted(checkpoint / "reference")
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_a_checkpoint_in_16_bits_with_stacked_experts(tmp_path: Path) -> None:
    save_tiny("qwen4_exp", tmp_path / "text")
    (tmp_path / "both").mkdir()
    multimodal("qwen4_exp", tmp_path / "text", tmp_path / "both")
    want = steps(TinyRunner(plan_for(tmp_path / "text")))
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path / "both"))), want, **TOLERANCE)


def test_a_table_in_16_bits_beside_quantized_experts(tmp_path: Path) -> None:
    publish(FORMS["FP8"], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    assert table_of(tmp_path / "quantized").table_dtype == ""
    torch.testing.assert_close(steps(TinyRunner(plan)), wanted(tmp_path / "reference"), **TOLERANCE)


def test_two_ranks_share_the_table(tmp_path: Path) -> None:
    publish(replace(FORMS["NVFP4"]), tmp_path)
    in_fp8(tmp_path)
    assert_ranks_alike(2, steps, TOLERANCE, tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{LAYER}{TABLE}.shard_2.weight", None, r"lacks weights of the model: .*shard_2.weight"),
        (f"{LAYER}{TABLE}.weight_scale", None, r"lacks weights of the model: .*ngram_embedding.weight_scale"),
        (f"{LAYER}{TABLE}.shard_9.weight", torch.zeros(3), r"weights that the model does not have: .*shard_9.weight"),
        (
            f"{LAYER}ple.ple_embedding.layer_multipliers",
            torch.tensor([1, 3, 5]),
            r"the checkpoint's layer_multipliers are \[1, 3, 5\], and by config.json they are .*'seed'",
        ),
    ],
)
def test_damaged_tables(name: str, change: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    publish(FORMS["mixed"], tmp_path)
    in_fp8(tmp_path)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors | ({} if change is None else {name: change}), file)
    with pytest.raises(UserError, match=message):
        TinyRunner(plan_for(tmp_path / "quantized"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_embedding_dtype": "nvfp4"}, "'ple_embedding_dtype'|ple_embedding_dtype = 'nvfp4' is not supported"),
        ({"ple_layer_ids": [0]}, "'ple_layer_ids' must be numbers from 1 to 4; got"),
        ({"ple_embed_dim": 50}, "'ple_embed_dim' 50 is not a multiple of the 8 rows"),
        ({"eos_token_id": None}, "n-grams end at 'eos_token_id'"),
        ({"ngram_vocab_size_base": 1 << 40}, "'ngram_vocab_size_base' must be between"),
        ({"indexer_budget": 15}, "'indexer_budget' 15 is not a multiple of 'indexer_compress_ratio' 4"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 is not supported"),
        ({"indexer_head_dim": 4}, "'indexer_head_dim' 4 is less than the 8 rotary dims"),
        ({"output_gate_type": "identity"}, "output_gate_type = 'identity' is not supported"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("qwen4_exp", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        _ = plan_for(tmp_path).description
