"""Step-3.5 and 3.7 as published: keys by layer, each matrix of all experts in one tensor, limits of the last layers'
activations, layers for drafts behind the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.errors import UserError

from .harness import TinyRunner, hf_logits, plan_for, random_tokens, reference_of, save_tiny
from .quantized_checkpoints import FORMS, Form, write_model

PUBLISHED = Path(__file__).parents[1] / "kernels" / "published"
TOKENS = random_tokens(37, seed=1)
KEPT = ["lm_head", "embed_tokens", "re:.*self_attn.*", "re:.*moe.gate$", "re:.*share_expert.*", "re:.*mlp.*"]
EXPERTS: dict[str, Form] = {
    "fp8": Form(
        FORMS["fp8_block"].write,
        {
            **FORMS["fp8_block"].config,
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")),
                *(f"model.layers.{i}.{part}" for i in range(3) for part in ("moe.gate", "share_expert")),
            ],
        },
    ),
    "modelopt": Form(
        FORMS["modelopt_nvfp4"].write,
        modelopt={
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "exclude_modules": ["lm_head", "*self_attn*", "*moe.gate", "*share_expert*", "*mlp*"],
            }
        },
    ),
    "llm-compressor": Form(FORMS["compressed_nvfp4"].write, {**FORMS["compressed_nvfp4"].config, "ignore": KEPT}),
}


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of published configs in place of those of transformers, with an entry more for a layer that drafts."""
    text = config["text_config"]
    kinds, sparse, rope = text["layer_types"], text.pop("mlp_layer_types"), text.pop("rope_parameters")
    for ours, theirs in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ):
        text[theirs] = text.pop(ours)
    del text["per_layer_config"]
    text |= {
        "attention_other_setting": {"num_attention_heads": text.pop("num_sliding_attention_heads")},
        "layer_types": [*kinds, "sliding_attention"],
        "moe_layers_enum": ",".join(str(i) for i, kind in enumerate(sparse) if kind == "sparse"),
        "rope_theta": [rope[kind]["rope_theta"] for kind in (*kinds, "sliding_attention")],
        "partial_rotary_factors": [rope[kind]["partial_rotary_factor"] for kind in (*kinds, "sliding_attention")],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
        "num_nextn_predict_layers": 1,
        "use_head_wise_attn_gate": True,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
    }
    return config


def save_step(form: Form, folder: Path) -> None:
    """`folder`/reference, and in `folder`/quantized the same with its experts in `form`."""
    save_tiny("step3p7_wide", folder / "reference")
    tensors = load_file(folder / "reference" / "model.safetensors")
    stored = {"model.layers.3.eh_proj.weight": torch.ones(4), "model.layers.3.moe.router_bias": torch.ones(4)}
    for key, tensor in list(tensors.items()):
        if ".moe." not in key or tensor.ndim < 3:
            stored[key] = tensor
            continue
        tensor[:, 0, 0] = 4.0  # gate and up of one expert share a scale, as exporters have it
        made, stand_for = zip(*(form.write(expert) for expert in tensor), strict=True)
        module = key.removesuffix("weight")
        stored |= {module + leaf: torch.stack([one[leaf] for one in made]).contiguous() for leaf in made[0]}
        tensors[key] = torch.stack(stand_for)
    save_file(tensors, folder / "reference" / "model.safetensors", {"format": "pt"})
    write_model(folder, stored, form)
    file = folder / "quantized" / "config.json"
    file.write_text(json.dumps(as_published(json.loads(file.read_text()))))


@pytest.mark.parametrize("form", EXPERTS)
def test_the_published_form_computes_what_it_stands_for(form: str, tmp_path: Path) -> None:
    save_step(EXPERTS[form], tmp_path)
    want = hf_logits(reference_of(tmp_path / "reference"), TOKENS)
    plan = plan_for(tmp_path / "quantized", kv_cache_dtype="float32")
    runner = TinyRunner(plan)
    pieces = (runner.extend({2: TOKENS[:20]})[0], runner.extend({2: TOKENS[20:30]})[0])
    got = torch.cat((*pieces, *(runner.decode({2: token}) for token in TOKENS[30:])))
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-3)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def changed(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= keys
    file.write_text(json.dumps(config))


def test_limits_are_reached(tmp_path: Path) -> None:
    """Without them the tiny model says something else, so its parity shows that they are computed."""
    model = save_tiny("step3p7", tmp_path)
    changed(tmp_path, swiglu_limits=[0.0] * 4, swiglu_limits_shared=[0.0] * 4)
    got = TinyRunner(plan_for(tmp_path)).extend({1: TOKENS})[0]
    assert (got - hf_logits(model, TOKENS)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"swiglu_limits": [0.0, 0.0, 0.0, -5.0]}, "swiglu_limits has -5.0; a limit is positive"),
        ({"swiglu_limits_shared": [0.0, 0.0, "7", 7.0]}, "'swiglu_limits_shared' must be a list of numbers"),
        ({"swiglu_limits": [7.0]}, "'swiglu_limits' must be a list of numbers, one for each of 4 layers"),
        ({"rope_theta": [1e4, 1e4, 5e6, 1e4]}, "'rope_theta' differs between layers of the type sliding_attention"),
        ({"rope_theta": [1e4]}, "'rope_theta' has 1 entries for 4 layers"),
        ({"mlp_layer_types": None, "moe_layers_enum": "1,x"}, "'moe_layers_enum' must be a list of layers' numbers"),
        ({"mlp_layer_types": None, "moe_layers_enum": 5}, "'moe_layers_enum' must be a list of layers' numbers; got 5"),
        ({"mlp_layer_types": None, "moe_layers_enum": "9" * 5000}, "'moe_layers_enum' must be a list of layers'"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate = False is not supported"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation = 'softmax' is not supported"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny("step3p7", tmp_path)
    changed(tmp_path, rope_parameters=None, rope_theta=[5e6, 1e4, 1e4, 5e6])
    changed(tmp_path, **keys)
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path).description.require_served()


@pytest.mark.parametrize("name", ["Step-3.5-Flash", "Step-3.7-Flash-NVFP4"])
def test_layers_of_the_published_config(name: str) -> None:
    layers = plan_for(PUBLISHED / name).description.layers
    full, window = layers[0].mixer, layers[1].mixer
    assert isinstance(full, GQA) and isinstance(window, GQA) and full.rope is not None and window.rope is not None
    assert (full.num_heads, full.window, full.rope.theta, full.rope.rot_dim) == (64, 0, 5e6, 64)
    assert (window.num_heads, window.window, window.rope.theta, window.rope.rot_dim) == (96, 512, 1e4, 128)
    assert (full.rope.kind, window.rope.kind) == ("llama3", "default")
    assert [isinstance(layer.mixer, GQA) and layer.mixer.window for layer in layers] == [0, 512, 512, 512] * 11 + [0]
    limits = [(layer.ffn.activation.limit, layer.ffn.shared.dense(layer.ffn.activation).activation.limit)  # type: ignore[union-attr,attr-defined]
              for layer in layers[3:]]  # fmt: skip
    assert limits == [(None, None)] * 40 + [(7.0, 16.0)] * 2
