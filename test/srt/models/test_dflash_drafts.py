"""DFlash drafts, written small as they are published: they load, and what is not computed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, plan_with_draft
from .harness import SIZES, random_tokens, save_tiny
from .test_eagle3_drafts import save

LAYERS, BLOCK, HIDDEN = 7, 5, SIZES["hidden_size"]
CAPTURES = (1, 4)
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_target_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "vocab_size": SIZES["vocab_size"],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 201, "target_layer_ids": list(CAPTURES)},
}
"""Heads, rotation, eps and MLP are not the target's."""


def weights(config: dict[str, Any] = CONFIG, seed: int = 3) -> dict[str, Tensor]:
    """Random, by the published names; every norm differs from one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(CAPTURES) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{norm}_norm.weight": (dim,) for norm in "qk"}
        rows = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()}
        shapes |= {f"{at}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}self_attn.o_proj.weight": (hidden, heads), f"{at}mlp.down_proj.weight": (hidden, inner)}
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.rand(shapes[name], generator=generator) + 0.5
    return tensors


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny("qwen3", folder, num_hidden_layers=LAYERS)
    return folder


def test_a_draft_as_published(target: Path, tmp_path: Path) -> None:
    plan = plan_with_draft(target, "DFLASH", save(tmp_path / "draft", CONFIG, weights()))
    runner = DraftRunner(plan)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")
    assert plan.captures == CAPTURES
    runner.batch_of_prompts({1: random_tokens(7, seed=1)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "not supported for DFLASH. Supported: DFlashDraftModel"),
        ({"dflash_config": {"mask_token_id": 5, "projector_type": "domino"}}, "dflash_config has projector_type: only"),
        ({"dflash_config": {}}, "'mask_token_id' is missing"),
        ({"dflash_config": {"mask_token_id": 1 << 20}}, "mask_token_id 1048576 is no token"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 7]}},
            "not all layers of the model, which has 7",
        ),
        ({"is_causal": True}, "the rows of a block see each other"),
        ({"vocab_size": 99}, "vocab_size is 99, and the model's"),
    ],
)
def test_other_drafts_are_refused(keys: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    draft = save(tmp_path / "draft", CONFIG | keys, weights())
    with pytest.raises(UserError, match=message):
        _ = plan_with_draft(target, "DFLASH", draft)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.1.self_attn.q_norm.weight", None, "lacks weights of the model: layers.1.self_attn.q_norm.weight"),
        ("fc.weight", (HIDDEN, 3), "tensor fc.weight has shape"),
        ("markov_head.weight", (2, 2), "does not have: markov_head.weight"),
    ],
)
def test_other_tensors_are_named(
    name: str, shape: tuple[int, ...] | None, message: str, target: Path, tmp_path: Path
) -> None:
    tensors = weights()
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(target, "DFLASH", save(tmp_path / "draft", CONFIG, tensors)))


def test_captures_that_the_config_does_not_name(target: Path, tmp_path: Path) -> None:
    config = CONFIG | {"dflash_config": {"mask_token_id": 5}}
    assert plan_with_draft(target, "DFLASH", save(tmp_path / "draft", config, weights())).captures == (1, 4)
