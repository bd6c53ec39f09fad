"""Mixture-of-experts models from quantized checkpoints on a CPU, against transformers with what they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.model_loader.loader import load_model
from sglang.srt.plan.ranks import RankLayout

from .harness import TinyRunner, blocks_of, plan_for
from .quantized_checkpoints import FORMS, ZERO_POINT_FORMS, save_gpt_oss, save_quantized
from .test_quantized import TOLERANCE, steps, wanted


@pytest.mark.parametrize("form", FORMS | ZERO_POINT_FORMS)
def test_every_form_computes_what_it_stands_for(form: str, tmp_path: Path) -> None:
    reference = save_quantized("qwen3_moe_wide", (FORMS | ZERO_POINT_FORMS)[form], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    want = wanted(reference)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    for layer in runner.model.layers:
        experts = blocks_of(layer)[1].experts
        assert experts.w13.scheme is not None and experts.w2.scheme is not None
    held = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert held == plan.weight_bytes(), "the plan counts other bytes than are allocated"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("glm4_moe_wide", "compressed_fp8_channel"),
        ("minimax_m2_wide", "fp8_block"),
        ("minimax_m2_wide", "modelopt_nvfp4"),
    ],
)
def test_families_in_the_forms_they_are_published_in(name: str, form: str, tmp_path: Path) -> None:
    reference = save_quantized(name, FORMS[form], tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    experts = blocks_of(runner.model.layers[-1])[1].experts.w13
    assert experts.scheme is not None and experts.num_experts == 4 + ("glm" in name), "the shared expert is one more"
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    reference = save_gpt_oss("gpt_oss_wide", tmp_path)
    plan = plan_for(tmp_path / "quantized", dtype="float32")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    weights = blocks_of(runner.model.layers[0])[1].experts.w13
    assert weights.scheme is not None and weights.scheme.name == "mxfp4"
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_layers_that_only_drafts_use_are_left_unread(tmp_path: Path) -> None:
    """GLM's layer behind the last one, with names of its own; one more layer is not known."""
    reference = save_quantized("glm4_moe_wide", FORMS["compressed_fp8_channel"], tmp_path)
    path = tmp_path / "quantized"
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    drafts = {name: torch.ones(4) for name in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight")}
    save_file(tensors | {f"model.layers.3.{name}": value for name, value in drafts.items()}, path / "model.safetensors")
    torch.testing.assert_close(steps(TinyRunner(plan_for(path))), wanted(reference), **TOLERANCE)
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(4)}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"weights that the model does not have: model.layers.4.enorm.weight"):
        load_model(plan_for(path))


def test_routed_experts_alone_may_be_quantized(tmp_path: Path) -> None:
    form = FORMS["compressed_int4_g32"]
    form = replace(form, config=dict(form.config) | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]})
    reference = save_quantized("qwen3_moe_wide", form, tmp_path, keep=("self_attn",))
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_16_bit_experts_quantized_while_loading(tmp_path: Path) -> None:
    reference = save_quantized("qwen3_moe_wide", FORMS["compressed_fp8_channel"], tmp_path)
    plain = replace(FORMS["compressed_fp8_channel"], write=lambda w: ({"weight": w}, w))
    save_quantized("qwen3_moe_wide", plain, tmp_path / "original")
    plan = plan_for(tmp_path / "original" / "reference", quantization="fp8")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_a_checkpoint_that_is_in_16_bits_after_all(tmp_path: Path) -> None:
    form = replace(FORMS["fp8_block"], write=lambda w: ({"weight": w.bfloat16()}, w.bfloat16().float()))
    reference = save_quantized("qwen3_moe_wide", form, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def _rank(rank: int, folder: Path, forms: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/rendezvous")
    for form in forms:
        plan = plan_for(folder / form / "quantized", tp_size=2)
        runner = TinyRunner(plan)
        held = sum(p.tensor.nbytes for p in runner.model.params.values())
        assert held == plan.weight_bytes(), "the plan counts other bytes than a rank allocates"
        torch.save(steps(runner), folder / f"{form}{rank}.pt")
    parallel_state.shutdown()


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    forms = ("compressed_int4_g32", "modelopt_nvfp4", "compressed_fp8_channel", "gptq_g32")
    references = {form: save_quantized("qwen3_moe_wide", FORMS[form], tmp_path / form) for form in forms}
    run_ranks(_rank, (tmp_path, forms), 2)
    for form, reference in references.items():
        want = wanted(reference)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{form}{rank}.pt"), want, **TOLERANCE)


def test_more_ranks_than_groups_is_a_start_up_error(tmp_path: Path) -> None:
    save_quantized("qwen3_moe_wide", FORMS["fp8_block"], tmp_path)
    plan = replace(plan_for(tmp_path / "quantized"), ranks=RankLayout(2))
    with pytest.raises(UserError, match="size 128 in groups of 128 that share .* too few for 2 .*hold none of 1"):
        plan.weight_bytes()
