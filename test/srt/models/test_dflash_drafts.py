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
    "head_dim": 48,
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
_BACKBONE = CONFIG["dflash_config"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": CONFIG,
    "domino": CONFIG
    | {
        "architectures": ["DominoDraftModel"],
        "emb_dim": 10,
        "dflash_config": _BACKBONE
        | {"projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 14, "pure_draft_prefix_len": 1}
        | {"shift_label": True},
    },
    "domino_in_place": CONFIG
    | {
        "dflash_config": _BACKBONE
        | {"projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 14, "pure_draft_prefix_len": 0}
        | {"shift_label": False}
    },
    "selector": {key: value for key, value in CONFIG.items() if key != "block_size"}
    | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": _BACKBONE
        | {"block_size": BLOCK, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 6},
    },
}
"""As z-lab and SpecForge write them."""
MASK_VECTOR = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9))
VARIANTS["mimo"] = CONFIG | {
    "partial_rotary_factor": 0.5,
    "v_head_dim": CONFIG["head_dim"],
    "vocab_size": 190,
    "dflash_config": _BACKBONE
    | {"use_swa": True, "swa_window_size": 16, "attention_value_scale": 0.612, "attention_sink_bias": True}
    | {"backbone_rotary_base": 5000000, "loss_decay_gamma": 7.0, "num_anchors": 4096, "block_size": BLOCK},
}
"""As MiMo's are published, with `mask_embedding.pt` beside the weights."""
VARIANTS["laguna"] = {key: value for key, value in CONFIG.items() if key != "block_size"} | {
    "architectures": ["DFlashLagunaForCausalLM"],
    "model_type": "laguna",
    "gating": "per-head",
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
    "draft_vocab_size": CONFIG["vocab_size"],
    "dflash_config": _BACKBONE | {"block_size": BLOCK, "causal": True},
}
"""As Laguna's are published, with q, k and v in one tensor."""
VARIANTS["causal"] = CONFIG | {"is_causal": True}
VARIANTS["windows"] = CONFIG | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
"""Which nothing says to be causal, as drafts are that came before the key."""
VARIANTS["speculators_windows"] = VARIANTS["windows"]
DRAFT_VOCAB = 40
VARIANTS["speculators"] = CONFIG | {"draft_vocab_size": DRAFT_VOCAB}
VARIANTS["speculators_selector"] = VARIANTS["selector"] | {
    "block_size": BLOCK,
    "draft_vocab_size": CONFIG["vocab_size"],
}
_OF_LAYERS = tuple(key for key in CONFIG if key not in ("architectures", "block_size", "dflash_config"))


def written(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The same draft as the speculators library writes it."""
    more = config.get("dflash_config", config)
    layers = {key: value for key, value in config.items() if key in _OF_LAYERS}
    others = {key: value for key, value in {**config, **more}.items() if key not in _OF_LAYERS}
    ids = others.pop("target_layer_ids")
    for key in ("dflash_config", "is_causal", "num_anchors"):
        others.pop(key, None)
    return others | {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in ids],
        "transformer_layer_config": layers | {"tie_word_embeddings": True},
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
    }


def stored(variant: str) -> dict[str, Any]:
    """The config.json of a variant."""
    kinds = {"speculators": "dflash", "speculators_selector": "dflash2", "speculators_windows": "dflash"}
    return written(VARIANTS[variant], kinds[variant]) if variant in kinds else VARIANTS[variant]


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
        if "gating" in config:
            for part in rows:
                del shapes[f"{at}self_attn.{part}_proj.weight"]
            shapes[f"{at}self_attn.qkv_proj.weight"] = (heads + 2 * kv_heads, hidden)
            shapes[f"{at}self_attn.g_proj.weight"] = (config["num_attention_heads"], hidden)
        if config.get("dflash_config", {}).get("attention_sink_bias"):
            shapes[f"{at}self_attn.attention_sink_bias"] = (config["num_attention_heads"],)
    if "gating" in config:
        shapes |= {f"aux_hidden_norms.{i}.weight": (hidden,) for i in range(len(CAPTURES))}
    shapes |= more_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.rand(shapes[name], generator=generator) + 0.5
    return tensors | of_reduced_head(config)


def of_reduced_head(config: dict[str, Any]) -> dict[str, Tensor]:
    """An output head for every sixth token; none where it has all."""
    rows, vocab = config.get("draft_vocab_size", config["vocab_size"]), config["vocab_size"]
    if rows == vocab:
        return {}
    tokens = 6 * torch.arange(rows)
    head = torch.randn((rows, config["hidden_size"]), generator=torch.Generator().manual_seed(8)) * 0.3
    return {
        "lm_head.weight": head,
        "d2t": tokens - torch.arange(rows),
        "t2d": torch.isin(torch.arange(vocab), tokens),
        "verifier_norm.weight": torch.ones(config["hidden_size"]),
    }


def more_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a draft has beside its layers' usual ones."""
    keys, hidden, vocab = config.get("dflash_config", {}), config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if keys.get("projector_type") == "domino":
        size, state = keys["emb_dim"], keys["gru_hidden_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * state, hidden), "prefix_gru.weight_hh_l0": (3 * state, state)}
        shapes |= {"embed_proj.0.weight": (size, hidden + state), "embed_proj.2.weight": (vocab, size)}
    if "selector_rank" in keys:
        rank, taps, groups = keys["selector_rank"], keys["conv_kernel_size"], hidden // keys["conv_group_size"]
        at = "candidate_selector."
        shapes |= {f"{at}{part}_codebook": (vocab, rank) for part in ("predecessor", "successor")}
        shapes |= {f"{at}hidden_projection.weight": (rank, hidden)}
        for i in range(config["num_hidden_layers"]):
            for conv in (f"layers.{i}.attention_conv.", f"layers.{i}.mlp_conv."):
                shapes |= {f"{conv}base_kernel": (2, taps, hidden)}
                shapes |= {f"{conv}kernel_projection.weight": (2 * taps * groups, hidden)}
    return shapes


def save_draft(variant: str, folder: Path) -> Path:
    """Writes a variant, and what lies beside its weights."""
    save(folder, stored(variant), weights(VARIANTS[variant]))
    save_mask_vector(variant, folder)
    return folder


def save_mask_vector(variant: str, folder: Path) -> None:
    if variant == "mimo":
        torch.save({"mask_token_id": 201, "embedding": MASK_VECTOR}, folder / "mask_embedding.pt")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny("qwen3", folder, num_hidden_layers=LAYERS)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_draft_as_published(variant: str, target: Path, tmp_path: Path) -> None:
    plan = plan_with_draft(target, "DFLASH", save_draft(variant, tmp_path / "draft"))
    runner = DraftRunner(plan)
    held = sum(param.tensor.nbytes for loadable, _ in runner.draft.loadables() for param in loadable.params.values())
    assert held == plan.draft.weight_bytes("float32")
    assert plan.aux_layers == CAPTURES
    runner.batch_of_prompts({1: random_tokens(7, seed=1)})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "not supported for DFLASH. Supported: DFlashDraftModel"),
        ({"dflash_config": {"mask_token_id": 5, "projector_type": "domino"}}, "'gru_hidden_dim' is missing"),
        ({"dflash_config": {"mask_token_id": 5, "projector_type": "lili"}}, "projector_type = 'lili' is not supported"),
        (
            {"dflash_config": {"mask_token_id": 5, "gru_hidden_dim": 8}},
            "gru_hidden_dim without projector_type 'domino'",
        ),
        ({"dflash_config": {"mask_token_id": 5, "selector_rank": 8}}, "'selector_top_k' is missing"),
        ({"dflash_config": {"mask_token_id": 5, "conv_group_size": 8}}, "'conv_kernel_size' is missing"),
        (
            {"dflash_config": {"mask_token_id": 5, "conv_group_size": 7, "conv_kernel_size": 2}},
            "conv_group_size 7 does not divide",
        ),
        ({"dflash_config": {"mask_token_id": 5, "output_multiplier": 2.0}}, "output_multiplier = 2.0 is not supported"),
        ({"dflash_config": {"mask_token_id": 5, "qat_w_bit": 4}}, "unknown keys: qat_w_bit"),
        ({"dflash_config": {}}, "'mask_token_id' is missing"),
        ({"dflash_config": {"mask_token_id": 1 << 20}}, "mask_token_id 1048576 is no token"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 7]}},
            "not all layers of the model, which has 7",
        ),
        ({"is_causal": 2}, "is_causal = 2 is not supported; supported: False, True"),
        ({"vocab_size": 99}, "vocab_size is 99, and the model's"),
        ({"speculators_model_type": "dspark"}, "'dspark' is not supported for DFLASH; supported: 'dflash', 'dflash2'"),
        (
            written(CONFIG | {"dflash_config": _BACKBONE | {"target_layer_ids": [1, 7]}}, "dflash"),
            "not all layers of the model, which has 7",
        ),
        (
            written(VARIANTS["selector"] | {"draft_vocab_size": 40}, "dflash2"),
            "draft_vocab_size 40 with a head that corrects draft tokens",
        ),
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


@pytest.mark.parametrize(
    ("variant", "name", "shape", "message"),
    [
        ("domino", "prefix_gru.weight_hh_l0", None, "lacks weights of the model: prefix_gru.weight_hh_l0"),
        ("domino", "embed_proj.0.weight", (10, HIDDEN), "tensor embed_proj.0.weight has shape"),
        ("domino", "prefix_gru.bias_ih_l0", (42,), "does not have: prefix_gru.bias_ih_l0"),
        ("selector", "candidate_selector.successor_codebook", None, "candidate_selector.successor_codebook"),
        (
            "selector",
            "layers.1.mlp_conv.base_kernel",
            None,
            "lacks weights of the model: layers.1.mlp_conv.base_kernel",
        ),
        ("selector", "layers.0.attention_conv.base_kernel", (2, 3, HIDDEN), "layers.0.attention_conv.base_kernel has"),
        ("selector", "layers.0.attention_conv.bias", (2,), "does not have: layers.0.attention_conv.bias"),
        (
            "plain",
            "candidate_selector.successor_codebook",
            (2, 2),
            "does not have: candidate_selector.successor_codebook",
        ),
    ],
)
def test_tensors_of_heads_are_named(
    variant: str, name: str, shape: tuple[int, ...] | None, message: str, target: Path, tmp_path: Path
) -> None:
    tensors = weights(VARIANTS[variant])
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    with pytest.raises(UserError, match=message):
        DraftRunner(plan_with_draft(target, "DFLASH", save(tmp_path / "draft", VARIANTS[variant], tensors)))


def test_captures_that_the_config_does_not_name(target: Path, tmp_path: Path) -> None:
    config = CONFIG | {"dflash_config": {"mask_token_id": 5}}
    assert plan_with_draft(target, "DFLASH", save(tmp_path / "draft", config, weights())).aux_layers == (1, 4)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"mask_token_id": 7, "embedding": MASK_VECTOR}, "is for mask token 7, and config.json names 201"),
        (MASK_VECTOR[1:], f"must hold one vector of {HIDDEN} numbers"),
        ({"other": MASK_VECTOR}, "it holds NoneType"),
        (MASK_VECTOR * torch.nan, "has a NaN"),
        (Path("."), "cannot be read as a tensor"),  # a class of its own, which would run code
    ],
)
def test_a_mask_vector_that_cannot_be_read_is_refused(held: Any, message: str, target: Path, tmp_path: Path) -> None:
    plan = plan_with_draft(target, "DFLASH", save_draft("mimo", tmp_path / "draft"))
    torch.save(held, tmp_path / "draft" / "mask_embedding.pt")
    with pytest.raises(UserError, match=message):
        DraftRunner(plan)


def test_a_mask_vector_may_be_the_whole_file(target: Path, tmp_path: Path) -> None:
    plan = plan_with_draft(target, "DFLASH", save_draft("mimo", tmp_path / "draft"))
    torch.save(MASK_VECTOR[None], tmp_path / "draft" / "mask_embedding.pt")
    vector = DraftRunner(plan).draft.mask_vector
    assert vector is not None and torch.equal(vector.vector, MASK_VECTOR)
