"""Checkpoints of models that a class of transformers computes: formats of weights and caches, and what is missing.

Families of our own are read both ways here, so that each is an oracle of the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.layers.quantization.dense import QuantizedLinear
from sglang.srt.plan.ranks import RankLayout
from srt.models.harness import TINY, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny
from srt.models.quantized_checkpoints import FORMS, ZERO_POINT_FORMS, save_quantized
from srt.models.test_quantized import TOLERANCE, steps, wanted
from srt.transformers_backend.tiny import save_tiny as save_class

CLASS = {"model_impl": "transformers"}
TOKENS = random_tokens(30, seed=1)
OF_FAMILIES = (
    *("qwen3", "qwen3_tied_bias", "qwen3_windows", "qwen3_moe", "qwen3_moe_mixed", "llama", "smollm3"),
    *("smollm3_windows", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral"),
    *("mistral_windows", "mixtral", "qwen2", "qwen2_moe", "glm4", "glm4_moe", "hy_v3", "minimax_m2", "mimo_v2"),
    *("gemma3", "gemma3_capped", "gemma4", "laguna"),
)
"""Those of `TINY` whose class is served."""


@pytest.mark.parametrize(
    ("model", "form"),
    [
        *(("qwen3_wide", form) for form in ("fp8_block", "modelopt_nvfp4", "compressed_int4_g128", "awq_g32")),
        *(("qwen3_moe_wide", form) for form in ("fp8_block", "gptq_g32")),
    ],
)
def test_quantized_forms_compute_what_they_stand_for(model: str, form: str, tmp_path: Path) -> None:
    reference = save_quantized(model, (FORMS | ZERO_POINT_FORMS)[form], tmp_path)
    plan = plan_for(tmp_path / "quantized", **CLASS)
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), wanted(reference), **TOLERANCE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    query = runner.model.decoder.layers[0].self_attn.q_proj  # type: ignore[attr-defined]
    assert isinstance(query.product.apply, QuantizedLinear)


def test_keys_and_values_in_fp8(tmp_path: Path) -> None:
    model = save_tiny("qwen3", tmp_path)
    runner = TinyRunner(plan_for(tmp_path, kv_cache_dtype="fp8_e4m3", **CLASS))
    want = hf_logits(model, TOKENS)
    got = torch.cat((*runner.extend({1: TOKENS[:20]}), *(runner.decode({1: token}) for token in TOKENS[20:])))
    assert runner.pools.tables and 0 < (got - want).norm() < 0.1 * want.norm()


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    save_tiny("cohere2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.layers.1.input_layernorm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks weights of the model: model.layers.1.input_layernorm.weight$"):
        TinyRunner(plan_for(tmp_path))
    save_file(
        {**tensors, "model.layers.1.input_layernorm.weight": norm, "model.layers.1.gate.weight": norm.clone()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"weights that the model does not have: model.layers.1.gate.weight$"):
        TinyRunner(plan_for(tmp_path))


OWN_CONFIG = """
from transformers import Olmo3Config

class OwnConfig(Olmo3Config):
    model_type = "own"
"""
OWN_MODEL = """
from transformers import Olmo3ForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(Olmo3ForCausalLM):
    config_class = OwnConfig
"""


def test_trusted_code_of_a_checkpoint_computes_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = save_class("olmo3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    config |= {
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text(OWN_CONFIG)
    (tmp_path / "modeling_own.py").write_text(OWN_MODEL)
    with pytest.raises(UserError, match="If you trust it, pass --trust-remote-code"):
        TinyRunner(plan_for(tmp_path))
    (logits,) = TinyRunner(plan_for(tmp_path, trust_remote_code=True)).extend({1: TOKENS})
    torch.testing.assert_close(logits, hf_logits(model, TOKENS), rtol=0.0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_family_and_its_class_say_the_same(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    runners = [TinyRunner(plan_for(tmp_path, model_impl=way)) for way in ("sglang", "transformers")]
    ours, theirs = (
        torch.cat((*runner.extend({1: TOKENS[:20]}), *(runner.decode({1: token}) for token in TOKENS[20:])))
        for runner in runners
    )
    assert type(runners[0].model) is not type(runners[1].model)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(theirs, hf_logits(model, TOKENS), rtol=0.0, atol=1e-3)


def test_no_family_of_the_list_is_unknown() -> None:
    assert set(OF_FAMILIES) <= TINY.keys()


def _rank(rank: int, ranks: RankLayout, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous")
    for name in names:
        plan = plan_for(folder / name, tp_size=ranks.tp_size, ep_size=ranks.ep_size, **CLASS)
        runner = TinyRunner(plan)
        held = sum(p.tensor.nbytes for p in runner.model.params.values())
        assert held == plan.weight_bytes(), f"{name}: the plan counts other bytes than a rank allocates"
        torch.save(torch.cat(runner.extend({1: TOKENS})), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(RankLayout(2), ("qwen3_tied_bias", "qwen3_moe", "gemma3", "mimo_v2"), id="TP2"),
        pytest.param(RankLayout(2, 2), ("qwen3_moe",), id="EP2", marks=pytest.mark.thorough),
        pytest.param(RankLayout(4), ("qwen3", "deepseek_v3", "cohere2"), id="TP4", marks=pytest.mark.thorough),
    ],
)
def test_ranks_say_what_one_rank_says(ranks: RankLayout, names: tuple[str, ...], tmp_path: Path) -> None:
    """Among them a tied embedding over an odd vocabulary, experts, a scaled embedding, and sinks."""
    want = {name: hf_logits(save_tiny(name, tmp_path / name), TOKENS) for name in names}
    run_ranks(_rank, (ranks, tmp_path, names), ranks.tp_size)
    for name in names:
        for rank in range(ranks.tp_size):
            got = torch.load(tmp_path / f"{name}{rank}.pt")
            torch.testing.assert_close(
                got, want[name], rtol=0.0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
