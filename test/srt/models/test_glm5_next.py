"""GLM-5.3-Flash beyond parity: cuts and chunks of prompts, other sizes, stages, published forms, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import describe_model

from .harness import DSA, TinyRunner, hf_logits, plan_for, random_tokens, reference_of, save_tiny
from .ranks_alike import assert_ranks_alike
from .test_pooled_sparse import StagePlan
from .test_quantized_hybrids import EXPERTS, TOKENS, Published, publish, steps

EXACT = {"rtol": 0.0, "atol": 1e-4}
"""Products of several rows are summed in another order than those of one."""
LENGTH = 30
"""Seven runs of 4 tokens, of which three are selected, and a part of one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm5_next")
    save_tiny("glm5_next", folder)
    return folder


def test_every_cut_of_a_prompt_and_chunks_of_every_size(folder: Path) -> None:
    runner, tokens = TinyRunner(plan_for(folder)), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for cut in range(1, LENGTH):
        parts = [runner.extend({2: tokens[:cut]})[0], runner.extend({2: tokens[cut:]})[0]]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)  # the slot's next request must not see this one's state
    for size in range(2, 12):
        parts = [runner.extend({2: tokens[first : first + size]})[0] for first in range(0, LENGTH, size)]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)


@torch.inference_mode()
def test_stages_cut_at_every_layer(folder: Path) -> None:
    """The streams travel between them."""
    plan, tokens = plan_for(folder), random_tokens(LENGTH, seed=5)
    whole, num_layers = TinyRunner(plan).extend({1: tokens})[0], len(plan.description.layers)
    for cut in range(1, num_layers):
        stages = [
            TinyRunner(StagePlan(plan.model, kv_cache_dtype=plan.kv_cache_dtype, layers=layers))
            for layers in (range(cut), range(cut, num_layers))
        ]
        parts = []
        for first in range(0, LENGTH, 11):
            intermediate = None
            for stage in stages:
                intermediate = stage.model.compute(
                    stage.batch_of_prompts({1: tokens[first : first + 11]}), intermediate
                )
            parts.append(stages[-1].model.logits(intermediate))
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)


OTHER_FORMS: dict[str, dict[str, Any]] = {
    "selects_one": {"index_topk": 4},
    "selects_all": {"index_topk": 256},
    "runs_of_2": {"index_kpool": 2, "index_topk": 6},
    "runs_of_8": {"index_kpool": 8, "index_topk": 8},
    "two_streams": {"hc_mult": 2, "hc_sinkhorn_iters": 2},
    "unbounded_decays": {"linear_lower_bound": None},
    "latents_alone": {"layer_types": [DSA] * 5},
    "groups_of_experts": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_sizes(form: str, tmp_path: Path) -> None:
    reference = save_tiny("glm5_next", tmp_path, **OTHER_FORMS[form])
    tokens = random_tokens(2 * LENGTH, seed=2)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


# --- published forms --------------------------------------------------------------------------------------------------

OF_DSA = r".*\.layers\.[12]\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)"
OF_DELTA = r".*\.layers\.0\.self_attn\.(q_proj|k_proj|v_proj|o_proj)"
MLPS = r".*\.mlp\.(shared_experts\.)?(gate|up|down)_proj"
SMALL = ("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "kv_b_proj")


def fp8(modules: dict[str, str]) -> dict[str, Any]:
    """As zai-org publishes it: modules in 16 bits are named one by one."""
    kept = [f"model.language_model.layers.{i}.self_attn.{name}" for i in range(3) for name in SMALL]
    kept += [f"model.language_model.layers.{i}.self_attn.indexer.{n}" for i in (1, 2) for n in ("wk", "wq_b")]
    kept += [f"model.language_model.layers.{i}.self_attn.indexer.weights_proj" for i in (1, 2)]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.visual", "mlp.gate", *kept],
    }


def nvfp4(modules: dict[str, str]) -> dict[str, Any]:
    """ModelOpt, with globs for what stays in 16 bits."""
    excluded = ["lm_head", "model.visual*", "*self_attn*", "*.mlp.gate", "*shared_experts*", "*layers.0.mlp*"]
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": [*excluded, "*layers.3*"]}
    return {"producer": {"name": "modelopt", "version": "0.45.0"}, "quantization": inner}


TOLERANCE = {"rtol": 0.0, "atol": 1e-3}
"""Changes of the weights by 1e-7 of their values move the logits by up to 2e-4, so that CPUs with other vector
instructions differ by as much."""

IN_TWO = {"intermediate_size": 256, "moe_intermediate_size": 256}
FORMS = {
    "FP8": Published("glm5_next_wide", ((f"{EXPERTS}|{MLPS}|{OF_DSA}|{OF_DELTA}", "blocks"),), fp8, more=IN_TWO),
    "NVFP4": Published("glm5_next_wide", ((EXPERTS, "NVFP4 of one scale"),), nvfp4, own_file=True),
}


def with_draft_layer(folder: Path) -> None:
    """What published checkpoints have behind the last layer, and nothing reads without drafts."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    names = ("eh_proj", "shared_head.norm")
    tensors |= {f"model.language_model.layers.3.{name}.weight": torch.zeros(3) for name in names}
    safetensors.torch.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_nextn_predict_layers": 1, "indexer_types": ["full"] * 4}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_computes_what_it_stands_for(name: str, tmp_path: Path) -> None:
    reference = publish(FORMS[name], tmp_path)
    with_draft_layer(tmp_path / "quantized")
    plan = plan_for(tmp_path / "quantized")
    runner, want = TinyRunner(plan), hf_logits(reference_of(reference), TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMS)
def test_two_ranks_share_a_published_form(name: str, tmp_path: Path) -> None:
    publish(FORMS[name], tmp_path)
    with_draft_layer(tmp_path / "quantized")
    assert_ranks_alike(2, steps, TOLERANCE, tmp_path)


# --- configs ----------------------------------------------------------------------------------------------------------


def changed(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {**config, "text_config": config["text_config"] | changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": None, "linear_attn_config": {"kda_layers": [0, 1, 3], "gate_lower_bound": -3.0}},
        {"linear_attn_config": {"kda_layers": [0, 1, 3], "full_attn_layers": [2, 4], "gate_lower_bound": -3.0}},
        {"linear_lower_bound": -3.0},
    ],
)
def test_layers_and_bounds_as_configs_write_them(changes: dict[str, Any], folder: Path) -> None:
    """Lists count layers from 0 on, other than Kimi Linear's."""
    model = describe_model(changed(folder, changes), None)
    model.require_served()
    kinds = [KimiDelta, KimiDelta, PooledLatent, KimiDelta, PooledLatent]
    assert [type(layer.mixer) for layer in model.layers] == kinds
    delta = model.layers[0].mixer
    assert isinstance(delta, KimiDelta) and delta.lower_bound == -3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 14}, "'index_topk' 14 is not a multiple of 'index_kpool' 4"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False is not supported"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64 is not supported"),
        ({"indexer_types": ["full"] * 4 + ["shared"]}, "'indexer_types' with layers that take a selection"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types sliding_attention are not described here yet"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 4]}}, "'layer_types' and kda_layers .* name different layers"),
        ({"index_head_dim": 6}, "'index_head_dim' 6 is not a multiple of 4"),
        ({"mhc": False}, "mhc = False is not supported"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        describe_model(changed(folder, changes), None).require_served()
