"""Ling 3.0: logits of a plain reference in every kind of step, on ranks and in quantized forms, its draft layer, and
what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.errors import UserError

from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .harness import TinyRunner, plan_for, random_tokens
from .ling3_reference import CONFIG, Ling3, save, weights
from .quantized_checkpoints import FORMS, Write, packed_int4, plain, unpacked_mxfp4
from .ranks_alike import assert_ranks_alike

TOKENS = random_tokens(37, seed=1)
CLOSE = {"rtol": 0.0, "atol": 1e-4}
TINY_FORM = CONFIG | {"q_lora_rank": 24, "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None}
"""As Ling-3.0-tiny: queries have a latent, and nothing is clamped."""
WITH_DRAFT = CONFIG | {"num_nextn_predict_layers": 1}

WIDE = CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "kv_lora_rank": 128,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "num_hidden_layers": 2,
}
_FP8 = plain("fp8_block", "weight_scale_inv")
_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "gate", "b_proj"],
}
_KEPT = r"lm_head|model\.word_embeddings|.*\.(gate|b_proj|\w*norm|\w_conv1d)"
_EXPERTS = r".*\.experts\.\d+\..*"
PUBLISHED: Mapping[str, tuple[dict[str, Any], tuple[tuple[str, Write | None], ...]]] = {
    "FP8": (_BLOCKS, ((_KEPT, None), (".*", _FP8))),
    "MXFP4 experts": (
        _BLOCKS | {"routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32, "scale_fmt": "ue8m0"},
        ((_EXPERTS, unpacked_mxfp4("weight_scale_inv")), (_KEPT, None), (".*", _FP8)),
    ),
    "INT4": (
        {**FORMS["compressed_int4_g32"].config, "ignore": ["lm_head", "re:.*attention.*", "re:.*gate$"]},
        ((_EXPERTS, packed_int4(32)), (r".*\.mlp\..*(gate|up|down)_proj", packed_int4(32)), (".*", None)),
    ),
}
"""quantization_config, and how modules are stored: the first match counts. Gates of latent attention have fewer rows
than a block of scales."""


def publish(name: str, folder: Path) -> Ling3:
    """Writes WIDE in a published form to `folder`/quantized. Returns what it stands for."""
    config, ways = PUBLISHED[name]
    tensors, stored = weights(WIDE), {}
    for key, tensor in tensors.items():
        module, _, leaf = key.rpartition(".")
        write = next(write for pattern, write in ways if re.fullmatch(pattern, module))
        if leaf != "weight" or write is None:
            stored[key] = tensor
            continue
        made, tensors[key] = write(tensor)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in made.items()}
    save(folder / "quantized", WIDE | {"quantization_config": config}, stored)
    return Ling3(tensors, WIDE)


def steps(runner: TinyRunner) -> torch.Tensor:
    """A prompt in chunks beside another one, then token by token in a batch."""
    first = runner.extend({2: TOKENS[:20], 5: TOKENS[9:15]})[0]
    second = runner.extend({5: TOKENS[15:19], 2: TOKENS[20:31]})[1]
    rest = [runner.decode({5: TOKENS[0], 2: token})[1:] for token in TOKENS[31:]]
    return torch.cat((first, second, *rest))


@pytest.mark.parametrize("config", [CONFIG, TINY_FORM], ids=["flash", "tiny"])
def test_logits_of_the_reference(config: dict[str, Any], tmp_path: Path) -> None:
    tensors = weights(config)
    plan = plan_for(save(tmp_path, config, tensors))
    assert plan.description.unsupported == ()
    runner, reference = TinyRunner(plan), Ling3(tensors, config)
    want = reference.logits(reference.hidden(TOKENS))
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_limits_change_what_comes_out() -> None:
    """Otherwise the test above would say nothing about them."""
    tensors, unlimited = weights(), CONFIG | {"expert_swiglu_limit_list": None}
    assert (Ling3(tensors, CONFIG).hidden(TOKENS) - Ling3(tensors, unlimited).hidden(TOKENS)).abs().max() > 0.01


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_give_the_logits_of_one(size: int, tmp_path: Path) -> None:
    save(tmp_path / "quantized", CONFIG, weights())
    assert_ranks_alike(size, steps, CLOSE, tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_compute_what_they_stand_for(name: str, tmp_path: Path) -> None:
    reference = publish(name, tmp_path)
    plan = plan_for(tmp_path / "quantized")
    runner = TinyRunner(plan)
    torch.testing.assert_close(steps(runner), reference.logits(reference.hidden(TOKENS)), rtol=0.0, atol=2e-3)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
    if name == "FP8":
        assert_ranks_alike(2, steps, {"rtol": 0.0, "atol": 1e-3}, tmp_path)


def test_its_layer_drafts(tmp_path: Path) -> None:
    tensors = weights(WITH_DRAFT)
    plan = plan_with_draft(save(tmp_path, WITH_DRAFT, tensors), "EAGLE")
    assert plan.draft.description.kind == "MTP"
    runner = DraftRunner(plan)
    check_proposals(runner, Ling3(tensors, WITH_DRAFT).draft, random_tokens(33, seed=2), 1e-3, states=True)


def test_layers_of_a_config(tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, CONFIG, {})).description.layers
    assert [type(layer.mixer) for layer in layers] == [KimiDelta, MLA, KimiDelta, MLA, MLA]
    delta, latent, *_ = (layer.mixer for layer in layers)
    assert isinstance(delta, KimiDelta) and delta.full_rank and delta.lower_bound == -5.0
    assert isinstance(latent, MLA) and latent.gate is not None and latent.rope is not None
    assert latent.rope.rot_dim == 8 and not latent.rope.is_neox_style
    limits = [
        (x.activation.limit, x.shared and x.shared.activation) for layer in layers if isinstance(x := layer.ffn, MoE)
    ]
    assert [limit for limit, _ in limits] == [None, None, 0.1, 0.2]
    assert [shared and shared.limit for _, shared in limits] == [None, 0.3, 0.3, 0.1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"no_kda_lora": False}, "no_kda_lora = False is not supported"),
        ({"kda_safe_gate": False}, "kda_safe_gate = False is not supported"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "= 'element_wise' is not supported"),
        ({"use_mla_nope": True}, "use_mla_nope = True is not supported"),
        ({"pregate_enabled": True}, "pregate_enabled = True is not supported"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = plan_for(save(tmp_path, CONFIG | keys, {})).description


@pytest.mark.parametrize("values", [["a"], [True], [-1.0]])
def test_limits_that_cannot_be_read_are_refused(values: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'expert_swiglu_limit_list' must be a list of numbers"):
        _ = plan_for(save(tmp_path, CONFIG | {"expert_swiglu_limit_list": values}, {})).description
