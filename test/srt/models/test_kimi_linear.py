"""Kimi Linear beyond parity: bounded decays, the forms of its configs and tensors, and what is not Kimi Linear."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.errors import UserError
from sglang.srt.plan.model_description import describe_model

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, save_tiny
from .test_pooled_sparse import StagePlan

EXACT = {"rtol": 0.0, "atol": 1e-4}
PUBLISHED = Path(__file__).parents[1] / "kernels" / "published"


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def rewrite(folder: Path, **changes: Any) -> None:
    config = config_of(folder)
    for key, value in changes.items():
        if isinstance(value, dict):
            config[key] = config[key] | value
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def test_decays_with_a_lower_bound(tmp_path: Path) -> None:
    """The gate of GLM-5.3-Flash and Kimi K3, which transformers has in the class of the former."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    reference = save_tiny("kimi_linear", tmp_path)
    rewrite(tmp_path, linear_attn_config={"gate_lower_bound": -5.0})
    tokens = random_tokens(70, seed=1)
    unbounded = hf_logits(reference, tokens)
    for layer in reference.model.layers:
        gate = getattr(layer.self_attn, "forget_gate", None)
        if gate is not None:
            gate.safe_gate_lower_bound = -5.0
            gate.forward = types.MethodType(Glm5NextTextForgetGate.forward, gate)
    expected = hf_logits(reference, tokens)
    assert (expected - unbounded).abs().max() > 0.1
    runner = TinyRunner(plan_for(tmp_path))
    first = runner.extend({2: tokens[:37]})[0]
    rest = [runner.decode({2: token})[0] for token in tokens[37:]]
    torch.testing.assert_close(torch.cat([first, torch.stack(rest)]), expected, **EXACT)


def test_layers_are_named_by_lists_that_count_from_one_or_by_layer_types(tmp_path: Path) -> None:
    save_tiny("kimi_linear", tmp_path)
    published = plan_for(tmp_path).description
    assert [type(layer.mixer) for layer in published.layers] == [KimiDelta, KimiDelta, MLA, KimiDelta]
    flat = config_of(tmp_path)
    inner = flat.pop("linear_attn_config")
    flat |= {"linear_num_heads": inner["num_heads"], "linear_head_dim": inner["head_dim"]}
    flat |= {
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    }
    assert describe_model(flat, None).layers == published.layers


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"kda_layers": [1, 2]}, "must name each layer from 1 to 4 once"),
        ({"kda_layers": [1, 2, 3, 4]}, "must name each layer from 1 to 4 once"),
        ({"kda_layers": [0, 1, 3]}, "must name each layer from 1 to 4 once"),
        ({"gate_lower_bound": 5.0}, "gate_lower_bound of 'linear_attn_config' must be below 0; got 5.0"),
        ({"gate_norm": True}, "keys gate_norm of 'linear_attn_config' are not described here yet"),
        ({"use_full_rank_gate": True}, "use_full_rank_gate is not supported"),
        ({"num_heads": 0}, "linear_num_heads"),
    ],
)
def test_configs_that_cannot_be_read(inner: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("kimi_linear", tmp_path)
    rewrite(tmp_path, linear_attn_config=inner)
    with pytest.raises(UserError, match=message):
        describe_model(config_of(tmp_path), None).require_served()


def test_positions_are_refused_where_none_are_computed(tmp_path: Path) -> None:
    save_tiny("kimi_linear", tmp_path)
    rewrite(tmp_path, mla_use_nope=False)
    with pytest.raises(UserError, match="mla_use_nope = False is not supported"):
        describe_model(config_of(tmp_path), None).require_served()


def test_kimi_k3_is_no_kimi_linear_of_another_size() -> None:
    config = json.loads((PUBLISHED / "Kimi-K3" / "config.json").read_text())
    with pytest.raises(UserError, match="'attn_res_block_size'.* is not described here yet"):
        describe_model(config, None)


def test_vectors_of_decays_are_stored_in_either_shape(tmp_path: Path) -> None:
    reference = save_tiny("kimi_linear", tmp_path)
    file, tokens = tmp_path / "model.safetensors", random_tokens(20, seed=3)
    tensors = safetensors.torch.load_file(file)
    flat = {name: tensor.flatten() if name.endswith("A_log") else tensor for name, tensor in tensors.items()}
    assert any(tensors[name].ndim == 4 and flat[name].ndim == 1 for name in tensors)
    safetensors.torch.save_file(flat, file)
    torch.testing.assert_close(
        TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0], hf_logits(reference, tokens), **EXACT
    )


@torch.inference_mode()
def test_stages_cut_at_every_layer(tmp_path: Path) -> None:
    """In chunks of 11 tokens; every stage keeps the states and latents of its layers."""
    save_tiny("kimi_linear", tmp_path)
    plan, tokens = plan_for(tmp_path), random_tokens(40, seed=5)
    whole, num_layers = TinyRunner(plan).extend({1: tokens})[0], len(plan.description.layers)
    for cut in range(1, num_layers):
        stages = [
            TinyRunner(StagePlan(plan.model, kv_cache_dtype=plan.kv_cache_dtype, layers=layers))
            for layers in (range(cut), range(cut, num_layers))
        ]
        parts = []
        for first in range(0, len(tokens), 11):
            intermediate = None
            for stage in stages:
                intermediate = stage.model.compute(
                    stage.batch_of_prompts({1: tokens[first : first + 11]}), intermediate
                )
            parts.append(stages[-1].model.logits(intermediate))
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
