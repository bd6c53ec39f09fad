"""EAGLE-3 heads, written small as they are published, guess what a plain head of the same weights draft tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .draft_references import Eagle3, Target
from .harness import SIZES, TinyRunner, plan_for, random_tokens, save_tiny

LAYERS = 7
TARGET = {"num_hidden_layers": LAYERS}
DRAFT_VOCAB = 96
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "vocab_size": SIZES["vocab_size"],
    "draft_vocab_size": DRAFT_VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""Heads, rotation, eps and MLP are not the target's."""


def weights(config: dict[str, Any], aux_layers: int = 3, seed: int = 3) -> dict[str, Tensor]:
    """Random, by the names of the newest form; every norm differs from one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, aux_layers * hidden), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        width, at = hidden * (2 if i == 0 else 1), f"layers.{i}."
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])]
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        rows = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (count, width) for part, count in rows.items()}
        shapes |= {f"{at}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, heads), f"{at}mlp.down_proj.weight": (hidden, inner)}
    if config["draft_vocab_size"]:
        shapes["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.rand(shapes[name], generator=generator) + 0.5
    if config["draft_vocab_size"]:
        known = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = known - torch.arange(len(known))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, known, True)
    return tensors


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    folder = tmp_path_factory.mktemp("target")
    return folder, Target(save_tiny("qwen3", folder, **TARGET))


def renamed(tensors: dict[str, Tensor], beginning: str, other: str) -> dict[str, Tensor]:
    return {
        other + name.removeprefix(beginning) if name.startswith(beginning) else name: tensor
        for name, tensor in tensors.items()
    }


def norms(count: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {f"fc_norm.{i}.weight": torch.rand(size, generator=generator) + 0.5 for i in range(count)}


USUAL = (1, LAYERS // 2 - 1, LAYERS - 4)
HIDDEN = SIZES["hidden_size"]
FORMS: dict[str, dict[str, Any]] = {
    "specforge": {"midlayer": True},
    "explicit layers": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, "aux_layers": (0, 2, 6)},
    "two captures": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1], "use_aux_hidden_state": True},
        "aux_layers": (3, 1),
    },
    "whole vocabulary, the target's head": {"draft_vocab_size": None},
    "norms of each capture": {"more": norms(3, HIDDEN), "keys": {"norm_output": True}, "norm_output": True},
    "norm before fc": {"more": {"input_norm.weight": torch.rand(3 * HIDDEN) + 0.5}, "keys": {"norm_before_fc": True}},
    "two layers": {"num_hidden_layers": 2},
    "biases": {"keys": {"attention_bias": True}, "bias": True},
    "speculators": {"speculators": True, "before_residual": True},
}


def build(form: dict[str, Any], folder: Path, target: Target) -> tuple[Path, Eagle3]:
    config = CONFIG | {key: form[key] for key in ("draft_vocab_size", "num_hidden_layers") if key in form}
    config |= form.get("keys", {}) | ({"eagle_config": form["eagle_config"]} if "eagle_config" in form else {})
    aux_layers = form.get("aux_layers", USUAL)
    tensors = weights(config, len(aux_layers)) | form.get("more", {})
    if form.get("bias"):
        for part in "qkv":
            name = f"layers.0.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.randn(len(tensors[f"{name}.weight"]))
        tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    reference = Eagle3(
        dict(tensors), config, target, aux_layers, form.get("before_residual", False), form.get("norm_output", False)
    )
    stored, written = dict(tensors), dict(config)
    if form.get("midlayer"):
        stored = renamed(stored, "layers.0.", "midlayer.")
    if form.get("speculators"):
        stored |= {"embed_tokens.weight": torch.zeros(SIZES["vocab_size"], HIDDEN)}  # the target's counts
        inner = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
        written = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCAB,
            "transformer_layer_config": inner,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        }
    return save(folder / "draft", written, stored), reference


@pytest.mark.parametrize("form", FORMS)
def test_heads_as_published(form: str, target: tuple[Path, Target], tmp_path: Path) -> None:
    folder, model = target
    draft, reference = build(FORMS[form], tmp_path, model)
    plan = plan_with_draft(folder, "EAGLE3", draft)
    runner = DraftRunner(plan)
    check_proposals(runner, reference, random_tokens(33, seed=2))
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32"), "the plan counts other bytes than the draft allocates"


def test_captures_leave_the_target_as_it_is(target: tuple[Path, Target], tmp_path: Path) -> None:
    folder, model = target
    draft, _ = build({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, tmp_path, model)
    runner, tokens = DraftRunner(plan_with_draft(folder, "EAGLE3", draft)), random_tokens(20, seed=5)
    with torch.inference_mode():
        batch = runner.batch_of_prompts({3: tokens})
        hidden = runner.model(batch)
        aux_hidden_states = batch.aux_hidden_states
        plain = TinyRunner(plan_for(folder))
        wanted = plain.model(plain.batch_of_prompts({5: tokens}))
    assert torch.equal(hidden, wanted)
    streams, _ = model.streams(tokens)
    for got, layer in zip(aux_hidden_states, (0, 3, 6), strict=True):
        torch.testing.assert_close(got, streams[layer], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "layers.0.hidden_norm.weight"}, r"lacks weights of the model: layers\.0\.hidden_norm\.weight"),
        ({"drop": "d2t"}, r"lacks weights of the model: d2t"),
        ({"add": "layers.1.mlp.up_proj.weight"}, r"weights that the model does not have: layers\.1\.mlp\.up_proj"),
        ({"cut": "fc.weight"}, r"tensor fc\.weight has shape \[64, 128\], but config\.json calls for \[64, 192\]"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm = True is not supported"),
        ({"eagle_config": {"surprise": 1}}, "eagle_config has unknown keys: surprise"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}}, "the outputs of the layers 1, 2, 7, and"),
        ({"architectures": ["Qwen9Eagle3"]}, "the draft architecture Qwen9Eagle3 is not supported here"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, and the model has a hidden size of 64"),
        ({"vocab_size": 300}, "vocab_size is 300, and the model's 256"),
        ({"hidden_act": "tanh"}, "hidden_act = 'tanh' is not supported"),
    ],
)
def test_what_does_not_fit_is_named(
    change: dict[str, Any], message: str, target: tuple[Path, Target], tmp_path: Path
) -> None:
    folder, _ = target
    tensors = weights(CONFIG)
    tensors.pop(change.get("drop", ""), None)
    if "add" in change:
        tensors[change["add"]] = torch.ones(3, 3)
    if "cut" in change:
        tensors[change["cut"]] = tensors[change["cut"]][:, :128].contiguous()
    keys = {key: value for key, value in change.items() if key not in ("drop", "add", "cut")}
    draft = save(tmp_path / "draft", CONFIG | keys, tensors)
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(folder, "EAGLE3", draft))
