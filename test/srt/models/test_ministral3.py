"""Ministral 3, Devstral 2 and Mistral 4 as they are published: beside an image encoder, and in FP8 with one scale a
matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.plan.ranks import RankLayout

from .harness import GROWING, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def beside_an_encoder(folder: Path, **outer: object) -> None:
    """Writes the names and the config of checkpoints that read images, too."""
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"vision_tower.ln_pre.weight": torch.ones(4)}, file)
    text = json.loads((folder / "config.json").read_text())
    text.pop("architectures")
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32", **outer}))


@pytest.mark.parametrize("name", ["ministral3", "mistral_windows", "mistral4"])
def test_the_text_half_beside_an_encoder(name: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path)
    beside_an_encoder(tmp_path)
    tokens = random_tokens(40, seed=1)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


def test_fp8_with_the_names_of_transformers(tmp_path: Path) -> None:
    """Static scales; codes are dequantized for the reference, whose inputs are not rounded."""
    reference = save_tiny("ministral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, exact = {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        exact[name] = codes.float() * scale
        stem = name.removesuffix("weight")
        tensors |= {name: codes, f"{stem}weight_scale_inv": scale, f"{stem}activation_scale": torch.tensor(0.02)}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    reference.load_state_dict(exact, strict=False)
    beside_an_encoder(tmp_path, quantization_config=FP8)
    tokens = random_tokens(40, seed=1)
    want = hf_logits(reference, tokens)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    assert (got - want).norm() / want.norm() < 0.15


def codes_of(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of [..., rows, columns], scales [..., row groups, column groups] of blocks, or with `block` 0 of all of it,
    and what they stand for."""
    rows, cols = (block, block) if block else weight.shape[-2:]
    pieces = weight.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))
    scale = pieces.abs().amax((-3, -1), keepdim=True) / 448
    codes = (pieces / scale).to(torch.float8_e4m3fn)
    exact = (codes.float() * scale).view(weight.shape)
    return codes.view(weight.shape), scale.squeeze((-3, -1)), exact


def save_fp8(folder: Path, static: bool = False, block: int = 0, apart: bool = True, **more: Any) -> Any:
    """Writes Mistral 4 as transformers does: experts are one tensor of codes. With one scale a matrix, gate and up have
    one each, or (`apart` False) one together; matrices that do not divide into blocks stay as they are. Returns
    transformers' model of what it stands for."""
    reference, file = save_tiny("mistral4_wide", folder, **more), folder / "model.safetensors"
    tensors, exact = {}, {}
    for name, tensor in load_file(file).items():
        experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        written = experts or name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
        if not written or (block and any(size % block for size in tensor.shape[-2:])):
            tensors[name] = tensor
            continue
        halves = apart and not block and name.endswith("gate_up_proj")
        codes, scale, value = codes_of(tensor.unflatten(1, (2, -1)) if halves else tensor, block)
        tensors[name], exact[name] = codes.view(tensor.shape), value.view(tensor.shape)
        scale = scale.flatten(1, 2) if halves else scale if experts or block else scale[0, 0]
        stem = f"{name}_" if experts else name.removesuffix("weight")
        tensors[f"{stem}scale_inv" if experts else f"{stem}weight_scale_inv"] = scale.contiguous()
        if static:
            tensors[f"{stem}activation_scale"] = torch.full((len(tensor),) if experts else (), 0.02)
    save_file(tensors, file)
    quantization = FP8 | {"activation_scheme": "static" if static else "dynamic"}
    quantization |= {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
    quantization |= {"weight_block_size": [block, block] if block else None}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    reference.load_state_dict(exact, strict=False)
    beside_an_encoder(folder, quantization_config=quantization)
    return reference


WRITTEN: dict[str, dict[str, Any]] = {
    "static, a scale for gate and up": {"static": True, "apart": False},  # as Mistral's own converter
    "static": {"static": True},
    "dynamic": {},
    "blocks": {"block": 128},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_mistral_4_in_fp8_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    reference, tokens = save_fp8(tmp_path, **WRITTEN[name]), random_tokens(40, seed=1)
    want = hf_logits(reference, tokens)
    plan = plan_for(tmp_path)
    runner = TinyRunner(plan)
    got = runner.extend({1: tokens})[0]
    # Without static scales, activations stay as they are on a CPU.
    assert (got - want).norm() / want.norm() < (0.15 if WRITTEN[name].get("static") else 1e-4)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for ep_size in (1, 2):
        parallel_state.init(RankLayout(2, ep_size), rank, "gloo", f"file://{folder}/rendezvous{ep_size}")
        for i in range(len(WRITTEN)):
            runner = TinyRunner(plan_for(folder / str(i), tp_size=2, ep_size=ep_size))
            torch.save(runner.extend({1: random_tokens(40, seed=1)})[0], folder / f"{i}{ep_size}{rank}.pt")
        parallel_state.shutdown()


def test_ranks_hold_parts_of_stacked_experts(tmp_path: Path) -> None:
    """Shares of every expert, and whole experts."""
    for i, options in enumerate(WRITTEN.values()):
        save_fp8(tmp_path / str(i), moe_intermediate_size=256, **options)
    run_ranks(_rank, (tmp_path,), 2)
    for i in range(len(WRITTEN)):
        want = TinyRunner(plan_for(tmp_path / str(i))).extend({1: random_tokens(40, seed=1)})[0]
        for ep_size in (1, 2):
            for rank in range(2):
                got = torch.load(tmp_path / f"{i}{ep_size}{rank}.pt")
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_blocks_of_gate_and_up_are_refused(tmp_path: Path) -> None:
    save_fp8(tmp_path, block=128, moe_intermediate_size=192)
    with pytest.raises(UserError, match="gate's 192 rows do not divide into blocks of 128 with one scale"):
        TinyRunner(plan_for(tmp_path))


def test_as_devstral_2_has_it(tmp_path: Path) -> None:
    """No growth, and an attention factor of the rotation that is not 1."""
    rope = {**GROWING, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0}
    reference = save_tiny("ministral3", tmp_path, rope_parameters=rope)
    tokens = random_tokens(40, seed=1)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


def test_text_of_another_kind_beside_the_encoder_is_refused(tmp_path: Path) -> None:
    save_tiny("ministral3", tmp_path)
    beside_an_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mixtral"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type = 'mixtral' is not supported for Mistral3ForConditionalGeneration"):
        _ = plan_for(tmp_path).description


def test_growth_without_a_length_is_refused(tmp_path: Path) -> None:
    save_tiny("ministral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'llama_4_scaling_beta' needs 'original_max_position_embeddings'"):
        _ = plan_for(tmp_path).description
