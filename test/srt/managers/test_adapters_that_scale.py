"""Adapters that scale the rows of the model's weights (DoRA), beside others that do not, against transformers with each
of them merged into the weights in fp32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from sglang.srt.configs.adapters.files import content_id
from sglang.srt.managers.scheduler.weight_updates import WeightUpdates
from sglang.srt.utils.engine_state import StateError
from srt.adapter_files import LINEAR, write_adapter
from srt.managers.test_adapters import Adapters, prompt, run

FORMS: dict[str, dict[str, Any]] = {
    "scaled": {"names": LINEAR, "rank": 5, "use_dora": True},
    "q and down": {"names": ("q_proj", "down_proj"), "rank": 17, "use_dora": True, "use_rslora": True},
    "plain": {"names": LINEAR, "rank": 8},
    "embedding": {"names": ("embed_tokens",), "rank": 4, "use_dora": True},
    "head": {"names": ("lm_head",), "rank": 3, "use_dora": True, "strength": 8.0},
}


@pytest.mark.parametrize("model", ["qwen3", "llama_bias_llama3"])
def test_beside_others(tmp_path: Path, model: str) -> None:
    """Also layers with a bias, which is not scaled, and one module of a product alone; slots change hands."""
    one = Adapters(model, tmp_path, FORMS)
    answers = {form: tuple(one.greedy(form, prompt(1))) for form in (None, *FORMS)}
    assert len(set(answers.values())) == len(answers)
    scheduler = one.scheduler(lora_paths=[str(one.paths["scaled"])], lora_target_modules=["all"], max_loras_per_batch=2)
    for seeds in ((1, 2), (3, 4)):
        run(one, scheduler, {f"{form} {seed}": (form, prompt(seed)) for form in (None, *FORMS) for seed in seeds})
    layers, plan = scheduler.runner.adapters, scheduler.runner.plan
    assert layers is not None and plan.adapters is not None
    used = sum(side.nbytes for linear in layers.linears for side in (linear.a, linear.b))
    used += sum(scales.nbytes for scales in layers.scales.values())
    assert used == plan.adapters.num_bytes(plan.weights, plan.dtype)


@pytest.mark.parametrize(
    ("tensor", "value", "refused"),
    [
        ("lora_magnitude_vector", 1e30, "row 3 of .*layers.1.self_attn.q_proj.* gets the length 1e\\+30"),
        ("lora_B.weight", 1e30, "and has inf with B A"),
        ("lora_magnitude_vector", 1e12, ""),
    ],
)
def test_lengths_that_answers_cannot_hold(tmp_path: Path, tensor: str, value: float, refused: str) -> None:
    """Of one row of many; the adapter is not loaded, and others are served."""
    one = Adapters("qwen3", tmp_path, {form: FORMS[form] for form in ("scaled", "plain")})
    scheduler = one.scheduler(lora_paths=[str(one.paths["scaled"])])
    path, table = tmp_path / "too long", scheduler.adapters
    assert table is not None
    write_adapter(path, one.models[None], 3, names=("q_proj",), use_dora=True)
    tensors = safetensors.torch.load_file(path / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith(f"layers.1.self_attn.q_proj.{tensor}"))
    tensors[name][3] = value
    safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")
    table.begin(content_id(path), str(path))
    assert re.search(refused, problem := table.end(content_id(path), False)) and bool(problem) == bool(refused)
    assert (content_id(path) in table) == (not refused)
    run(one, scheduler, {str(form): (form, prompt(1)) for form in (None, "scaled", "plain")})


def test_new_weights_are_refused_meanwhile(tmp_path: Path) -> None:
    one = Adapters("qwen3", tmp_path, {"scaled": FORMS["scaled"], "plain": FORMS["plain"]})
    scheduler = one.scheduler(lora_paths=[str(one.paths["scaled"])])
    updates = WeightUpdates.__new__(WeightUpdates)
    updates.scheduler = scheduler
    with pytest.raises(StateError, match="use_dora have lengths of the old weights"):
        updates._refuse_scaled()
    assert scheduler.adapters is not None
    scheduler.adapters.unload(one.ids["scaled"])
    updates._refuse_scaled()


def test_a_server_without_room(tmp_path: Path) -> None:
    one = Adapters("qwen3", tmp_path, {"scaled": FORMS["scaled"]})
    table = one.scheduler(False).adapters
    assert table is not None
    table.begin(one.ids["scaled"], str(one.paths["scaled"]))
    assert "has no room for factors of rows (use_dora)" in table.end(one.ids["scaled"], False)


def test_latents_and_experts_are_refused(tmp_path: Path) -> None:
    one = Adapters("deepseek_v3", tmp_path, {"a": {"names": ("o_proj",), "use_dora": True}})
    table = one.scheduler(lora_paths=[str(one.paths["a"])], lora_target_modules=["all"]).adapters
    assert table is not None
    path = tmp_path / "latents"
    write_adapter(path, one.models[None], 1, names=("kv_b_proj",), use_dora=True)
    table.begin(content_id(path), str(path))
    assert "use_dora is not supported for model.layers.0.self_attn.kv_b_proj" in table.end(content_id(path), False)


def test_drafts(tmp_path: Path) -> None:
    one = Adapters("qwen3", tmp_path, {form: FORMS[form] for form in ("scaled", "plain")})
    scheduler = one.scheduler(
        lora_paths=[str(path) for path in one.paths.values()], speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=4,
    )  # fmt: skip
    run(one, scheduler, {str(form): (form, prompt(2, 6) * 4) for form in (None, "scaled", "plain")})
