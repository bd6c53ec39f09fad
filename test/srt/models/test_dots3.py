"""dots3-note: logits of a plain reference, and of transformers' class, in every kind of step, on ranks and in FP8, its
draft layer, and what is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.conditions import flashinfer_latents
from sglang.srt.kernels.spec import Need

from .dots3_reference import CONFIG, Dots3, weights
from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .harness import TinyRunner, plan_for, random_tokens
from .ling3_reference import save
from .quantized_checkpoints import plain
from .ranks_alike import assert_ranks_alike
from .test_ling3 import CLOSE, TOKENS, steps

WIDE = CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "swa_q_lora_rank": 128,
    "swa_kv_lora_rank": 256,
    "swa_head_dim": 256,
    "swa_qk_nope_head_dim": 192,
    "swa_qk_rope_head_dim": 64,
    "swa_v_head_dim": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
}
"""Whole blocks of scales, and selected latents of the published size."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT = r"lm_head|model\.(mtp\.)?embed_tokens|.*(norm|mlp\.gate|weights_proj)"
"""Modules that the form leaves in 16 bits. Gates of heads have fewer rows than a block of scales."""


def in_fp8(folder: Path) -> Dots3:
    """Writes WIDE in blocks of FP8 to `folder`/quantized. Returns what it stands for."""
    tensors, stored = weights(WIDE), {}
    write = plain("fp8_block", "weight_scale_inv")
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or re.fullmatch(KEPT, module):
            stored[name] = tensor
            continue
        made, tensors[name] = write(tensor)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
    save(folder / "quantized", WIDE | {"quantization_config": FP8}, stored)
    return Dots3(tensors, WIDE)


def test_logits_of_the_reference(tmp_path: Path) -> None:
    tensors = weights(draft=True)
    plan = plan_for(save(tmp_path, CONFIG, tensors))
    assert plan.description.unsupported == ()
    runner, want = TinyRunner(plan), Dots3(tensors, CONFIG).logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


@pytest.mark.parametrize("name", [name for name in ("Dots3NoteForCausalLM",) if hasattr(transformers, name)])
def test_the_reference_is_the_class_of_transformers(name: str, tmp_path: Path) -> None:
    """The installed release may be older than the class; the nightly run has one that is not."""
    tensors = weights()
    keys = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.Dots3NoteTextConfig(**keys, bos_token_id=1)
    save(tmp_path, config.to_dict() | {"architectures": [name], "dtype": "float32"}, tensors)
    model = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(Dots3(tensors, CONFIG).logits(TOKENS), want, **CLOSE)
    # The config as this release writes it says the same in other words.
    torch.testing.assert_close(steps(TinyRunner(plan_for(tmp_path))), want, **CLOSE)


def test_the_selection_and_the_window_change_what_comes_out() -> None:
    """Otherwise the tests above would say nothing about them."""
    tensors, wider = weights(), CONFIG | {"sliding_window_size": 8}
    want, all_seen = (Dots3(tensors, CONFIG, selects).logits(TOKENS) for selects in (True, False))
    assert (want - all_seen).abs().max() > 0.01
    longer = Dots3(tensors, wider).logits(TOKENS)
    torch.testing.assert_close(want[:7], longer[:7])
    assert (want - longer)[7:].abs().amax(1).min() > 0.001


@pytest.mark.parametrize("pays", [False, True])
def test_windows_attend_to_latents_as_to_what_is_made_of_them(
    pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of any length behind prefixes of any length, where expanding what they see never pays, or always does."""
    monkeypatch.setattr(MLA, "expanding_pays", lambda self, prefix_lens, new_lens: pays)
    tensors = weights()
    runner = TinyRunner(plan_for(save(tmp_path, CONFIG, tensors)))
    ends = [0, 1, 4, 11, 13, 30, len(TOKENS)]
    got = [runner.extend({3: TOKENS[a:b]})[0] for a, b in itertools.pairwise(ends)]
    torch.testing.assert_close(torch.cat(got), Dots3(tensors, CONFIG).logits(TOKENS), **CLOSE)


def test_expanding_pays_by_what_windows_see() -> None:
    spec = replace(MLA(64, 1024, 1024, 192, 64, 128), window=513)
    saved, cost = 1088 + 1024 - 256 - 128, 1024 * (192 + 128)
    for prefix, new in itertools.product((0, 1, 300, 512, 513, 5000), (1, 2, 100, 213, 1000)):
        pairs = sum(min(513, prefix + i) for i in range(1, new + 1))
        assert spec.expanding_pays([prefix], [new]) == (pairs * saved > min(prefix, 512) * cost), (prefix, new)
    assert spec.expanded_lens([0, 300, 512, 5000]) == [0, 300, 512, 512]


def test_libraries_without_windows_over_latents_are_not_chosen() -> None:
    need = Need("decode_attention", 576, 512, "bfloat16", "bfloat16", traits=frozenset({"mla", "sliding_window"}))
    assert flashinfer_latents(need, arch_by_name("sm_120")) == ["latents of windows"]
    assert flashinfer_latents(replace(need, traits=frozenset({"mla"})), arch_by_name("sm_120")) == []


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_give_the_logits_of_one(size: int, tmp_path: Path) -> None:
    """In fp32, and in FP8."""
    save(tmp_path / "plain" / "quantized", CONFIG, weights())
    in_fp8(tmp_path / "fp8")
    tolerance = {"rtol": 0.0, "atol": 1e-3}
    assert_ranks_alike(size, steps, tolerance, tmp_path / "plain", *[tmp_path / "fp8"] * (size == 2))


def test_fp8_computes_what_it_stands_for(tmp_path: Path) -> None:
    reference = in_fp8(tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), reference.logits(TOKENS), rtol=0.0, atol=2e-3)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


BY_LAYER = {key: value for key, value in CONFIG.items() if not key.startswith("swa_") and key != "use_dsa"} | {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {
        layer: {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
        }
        for layer in ("1", "03")
    },
    "rope_parameters": {
        "indexed_attention": {"rope_type": "default", "rope_theta": 6000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
"""CONFIG in the words of transformers' class, which states what differs from the other layers, and pads numbers."""


@pytest.mark.parametrize(
    ("config", "own"),
    [
        pytest.param(CONFIG, True, id="own embedding"),
        pytest.param(CONFIG, False, id="the model's"),
        pytest.param(BY_LAYER, True, id="sizes by layer"),
    ],
)
def test_its_layer_drafts(config: dict[str, Any], own: bool, tmp_path: Path) -> None:
    tensors = weights(draft=True)
    if not own:
        del tensors["model.mtp.embed_tokens.weight"]
    plan = plan_with_draft(save(tmp_path, config, tensors), "EAGLE")
    assert plan.draft.description.kind == "MTP" and plan.draft.description.own_embedding == own
    check_proposals(DraftRunner(plan), Dots3(tensors, CONFIG).draft, random_tokens(33, seed=2), 1e-3)


def test_layers_of_a_config(tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, CONFIG, {})).description.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, MLA)]
    assert [mixer.window for mixer in mixers] == [0, 7, 0, 7]
    assert [mixer.top_k for mixer in mixers] == [6, 0, 6, 0]
    full, windowed = mixers[:2]
    assert (full.num_heads, full.kv_lora_rank, full.qk_dim) == (8, 16, 24)
    assert (windowed.num_heads, windowed.kv_lora_rank, windowed.qk_dim) == (4, 32, 32)
    assert full.rope is not None and windowed.rope is not None
    assert (full.rope.theta, windowed.rope.theta) == (6000.0, 100.0)
    assert full.indexer is not None and not full.indexer.is_neox_style
    assert full.norms.factor(64, 16) == 2.0 and full.norms.eps == 1e-5
    assert plan_for(save(tmp_path, BY_LAYER, {})).description.layers == layers


def test_the_key_of_later_releases_says_the_window(tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, CONFIG | {"sliding_window": 5}, {})).description.layers
    assert [layer.mixer.window for layer in layers if isinstance(layer.mixer, MLA)] == [0, 5, 0, 5]


DENSE_THIRD = ["sparse", "sparse", "dense", "sparse"]


@pytest.mark.parametrize(
    ("keys", "with_experts"),
    [
        ({}, [1, 2, 3]),
        ({"first_k_dense_replace": 2}, [2, 3]),
        ({"moe_layer_freq": [1, 0, 1, 1]}, [2, 3]),
        ({"mlp_layer_types": DENSE_THIRD}, [0, 1, 3]),
        ({"mlp_layer_types": DENSE_THIRD, "moe_layer_freq": [1, 0, 1, 1]}, [0, 1, 3]),
    ],
)
def test_which_layers_have_experts(keys: dict[str, Any], with_experts: list[int], tmp_path: Path) -> None:
    """As in transformers' class, where the installed release has it."""
    layers = plan_for(save(tmp_path, CONFIG | keys, {})).description.layers
    assert [i for i, layer in enumerate(layers) if isinstance(layer.ffn, MoE)] == with_experts
    if config_class := getattr(transformers, "Dots3NoteTextConfig", None):
        kinds = config_class(num_hidden_layers=4, **keys).mlp_layer_types
        assert [i for i, kind in enumerate(kinds) if kind == "sparse"] == with_experts


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale = False is not supported"),
        ({"k_rope_only_layernorm": False}, "k_rope_only_layernorm = False is not supported"),
        ({"swa_attention_gate_type": "elementwise"}, "swa_attention_gate_type = 'elementwise' is not supported"),
        ({"use_dsa": False}, "use_dsa = False is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_key_value_heads": 4}, " num_key_value_heads = 4 is not supported .* supported: 8"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads = 2 is not supported .* supported: 4"),
        ({"swa_head_dim": 40}, "swa_head_dim = 40 is not supported .* supported: 32"),
        ({"per_layer_config": {}, "use_dsa": None}, "has no indexer, .* are 'indexed_attention' in 'layer_types'"),
        ({"rope_parameters": LINEAR}, "'rope_parameters' of all layers alike is not supported, .* by layer type"),
        ({"rope_scaling": LINEAR}, "'rope_scaling' of all layers alike is not supported, .* by layer type"),
        ({"sliding_window_size": None}, "layers with a window need 'sliding_window_size'"),
        ({"index_topk": None}, "layers without a window need 'index_topk'"),
        ({"layer_types": ["full_attention", "chunked"] * 2}, "layer_types chunked are not described here yet"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "has nothing for sliding_attention"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = plan_for(save(tmp_path, CONFIG | keys, {})).description


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mtp_head_sharing": "none"}, "mtp_head_sharing = 'none' is not supported"),
        ({"mtp_use_moe": True}, "mtp_use_moe = True is not supported"),
    ],
)
def test_other_draft_layers_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        plan_with_draft(save(tmp_path, CONFIG | keys, weights(draft=True)), "EAGLE")


@pytest.mark.parametrize(("kv_dtype", "most"), [("fp8_e4m3", 0.2), ("fp4_e2m1", 0.6)])
def test_latents_of_windows_are_not_quantized(kv_dtype: str, most: float, tmp_path: Path) -> None:
    """Those that are selected are packed beside them."""
    tensors = weights(WIDE)
    runner = TinyRunner(plan_for(save(tmp_path, WIDE, tensors), kv_cache_dtype=kv_dtype))
    stored = {cache.layer_id: cache.k for cache in runner.model.caches if cache.name == "latent"}
    assert stored[0].dtype == torch.uint8
    assert stored[1].dtype == torch.float32 and stored[1].shape[1:] == (1, 320)
    want = Dots3(tensors, WIDE).logits(TOKENS)
    assert 0 < (steps(runner) - want).std() < most * want.std()
