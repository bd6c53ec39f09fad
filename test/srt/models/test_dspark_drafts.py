"""DSpark drafts, written small as they are published: they load, and what is not computed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, plan_with_draft
from .harness import random_tokens, save_tiny
from .test_dflash_drafts import BLOCK, CAPTURES, DRAFT_VOCAB, HIDDEN, target, written
from .test_dflash_drafts import CONFIG as BACKBONE
from .test_dflash_drafts import weights as backbone_weights
from .test_eagle3_drafts import save

__all__ = ["target"]
RANK = 12
VOCAB = BACKBONE["vocab_size"]
CONFIG: dict[str, Any] = {key: value for key, value in BACKBONE.items() if key != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 201,
    "target_layer_ids": list(CAPTURES),
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""As DeepSpec writes it."""
KINDS = ("vanilla", "gated", "rnn")
TABLE = {key: CONFIG[key] for key in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")}
SPECFORGE = {key: value for key, value in CONFIG.items() if key not in TABLE} | {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {**TABLE, "projector_type": "dspark", "attention_mode": "gqa"},
}


def weights(config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """The backbone's, with the copies of the target's embedding and head that such checkpoints have, and the heads'."""
    tensors, generator = backbone_weights(config), torch.Generator().manual_seed(4)
    vocab, hidden, rank = config["vocab_size"], config["hidden_size"], config.get("markov_rank", RANK)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (config.get("draft_vocab_size", vocab), rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    gates = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
    if config["markov_head_type"] in gates:
        name, rows, cols = gates[config["markov_head_type"]]
        shapes |= {f"markov_head.{name}.weight": (rows, cols), f"markov_head.{name}.bias": (rows,)}
    more = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    return more | tensors


REDUCED = CONFIG | {"draft_vocab_size": DRAFT_VOCAB}
SPECULATORS = written(REDUCED, "dspark")


GEMMA4_LAYERS = 6
GEMMA4_OF_HEADS = {"num_attention_heads": 4, "num_global_key_value_heads": 1, "global_head_dim": 64, "head_dim": 32}
GEMMA4_CONFIG: dict[str, Any] = {key: value for key, value in CONFIG.items() if key not in ("hidden_act", "rope_theta")}
GEMMA4_CONFIG |= GEMMA4_OF_HEADS | {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 2,
    "num_target_layers": GEMMA4_LAYERS,
    "layer_types": ["full_attention"] * CONFIG["num_hidden_layers"],
    "sliding_window": 12,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 20.0,
    "markov_head_type": "gated",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""As DeepSpec writes it: the target's config with fewer layers."""


def gemma4_target(folder: Path) -> Any:
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * (GEMMA4_LAYERS // 3)
    return save_tiny("gemma4", folder, num_hidden_layers=GEMMA4_LAYERS, layer_types=layers)


def gemma4_weights() -> dict[str, Tensor]:
    """Values are keys, norms stand around both blocks of a layer, and its output is scaled."""
    heads = {"head_dim": GEMMA4_CONFIG["global_head_dim"], "num_key_value_heads": 1}
    tensors, generator = weights(GEMMA4_CONFIG | heads), torch.Generator().manual_seed(5)
    for i in range(CONFIG["num_hidden_layers"]):
        del tensors[f"layers.{i}.self_attn.v_proj.weight"]
        for norm in ("pre", "post"):
            tensors[f"layers.{i}.{norm}_feedforward_layernorm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
        tensors[f"layers.{i}.layer_scalar"] = torch.rand(1, generator=generator) + 0.5
    return tensors


def test_gemma_4s_draft_as_published(tmp_path: Path) -> None:
    gemma4_target(tmp_path / "target")
    draft = save(tmp_path / "draft", GEMMA4_CONFIG, gemma4_weights())
    plan = plan_with_draft(tmp_path / "target", "DSPARK", draft)
    runner = DraftRunner(plan)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")


@pytest.mark.parametrize("config", [*(CONFIG | {"markov_head_type": kind} for kind in KINDS), SPECFORGE, SPECULATORS])
def test_a_draft_as_published(config: dict[str, Any], target: Path, tmp_path: Path) -> None:
    tensors = weights(REDUCED if config is SPECULATORS else {"markov_head_type": "vanilla"} | config)
    plan = plan_with_draft(target, "DSPARK", save(tmp_path / "draft", config, tensors))
    runner = DraftRunner(plan)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")
    assert plan.aux_layers == CAPTURES and plan.draft.description.kind == "DSPARK"
    runner.batch_of_prompts({1: random_tokens(7, seed=1)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["LlamaDSparkModel"]}, "not supported for DSPARK. Supported: Qwen3DSparkModel"),
        ({"markov_head_type": "fir"}, "markov_head_type 'fir' is not supported; supported: vanilla, gated, rnn"),
        ({"mask_token_id": None}, "'mask_token_id' is missing"),
        ({"mask_token_id": 1 << 20}, "mask_token_id 1048576 is no token"),
        ({"target_layer_ids": [1, 7]}, "not all layers of the model, which has 7"),
        ({"target_layer_ids": [True]}, "not all layers of the model"),
        ({"is_causal": True}, "is_causal = True is not supported; supported: False"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type = 'domino' is not supported"),
        ({"dflash_config": {"selector_rank": 4}}, "dflash_config has unknown keys: selector_rank"),
        ({"vocab_size": 99}, "vocab_size is 99, and the model's"),
    ],
)
def test_other_drafts_are_refused(keys: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", CONFIG | keys, weights())
    with pytest.raises(UserError, match=message):
        _ = plan_with_draft(target, "DSPARK", draft)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("markov_head.markov_w2.weight", None, "lacks weights of the model: markov_head.markov_w2.weight"),
        ("markov_head.joint_proj.bias", None, "lacks weights of the model: markov_head.joint_proj.bias"),
        ("markov_head.joint_proj.weight", (RANK, HIDDEN), "tensor markov_head.joint_proj.weight has shape"),
        ("markov_head.markov_w1.weight", (VOCAB, 3), "tensor markov_head.markov_w1.weight has shape"),
        ("markov_head.gate_proj.weight", (2, 2), "does not have: markov_head.gate_proj.weight"),
        ("confidence_head.proj.weight", None, "lacks weights of the model: confidence_head.proj.weight"),
        ("confidence_head.proj.weight", (1, HIDDEN), "tensor confidence_head.proj.weight has shape"),
    ],
)
def test_other_tensors_are_named(
    name: str, shape: tuple[int, ...] | None, message: str, target: Path, tmp_path: Path
) -> None:
    config = CONFIG | {"markov_head_type": "rnn"}
    tensors = weights(config)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(target, "DSPARK", save(tmp_path / "draft", config, tensors)))


def test_a_confidence_head_that_the_config_does_not_mention(target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", CONFIG | {"enable_confidence_head": False}, weights())
    with pytest.raises(UserError, match="does not have: confidence_head.proj"):
        DraftRunner(plan_with_draft(target, "DSPARK", draft))


def test_a_draft_in_a_directory_of_the_model(target: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in target.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    with pytest.raises(UserError, match="brings no DSpark draft: its config.json has no dspark_block_size"):
        plan_with_draft(tmp_path / "model", "DSPARK")
    save(tmp_path / "model" / "dspark", CONFIG, weights())
    assert plan_with_draft(tmp_path / "model", "DSPARK").draft.description.form.rows_a_request == BLOCK
