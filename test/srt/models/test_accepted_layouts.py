"""Every layout that the plan accepts can be built on every rank: what does not divide is refused before a process
starts, with layouts that work. Published shapes, and shapes that published models do not have, in few layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.ranks import RankLayout

from .harness import NativePlan, plan_for

KERNELS = Path(__file__).parents[1] / "kernels"
FEW = {"num_hidden_layers": 2, "n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16, "vocab_size": 1003}
FEW |= {"n_group": 1, "topk_group": 1, "eos_token_id": 2}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("configs/deepseek_v3.json", FEW),
    "glm47": ("configs/glm47.json", FEW),
    "gpt_oss": ("configs/gpt_oss.json", FEW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "minimax_m2": ("configs/minimax_m2.json", FEW | {"attn_type_list": [1, 1]}),
    "qwen3_block": ("configs/qwen3.json", {"num_hidden_layers": 2, "quantization_config": FP8_BLOCK}),
    "narrow_heads": (
        "configs/qwen3.json",
        {"num_hidden_layers": 2, "head_dim": 64, "quantization_config": FP8_BLOCK},
    ),
    "qwen3_next": (
        "published/Qwen3-Next-80B-A3B/config.json",
        FEW | {"num_hidden_layers": 4, "quantization_config": FP8_BLOCK},
    ),
    "nemotron": (
        "published/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/config.json",
        FEW | {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*-"},
    ),
}
LAYOUTS = [RankLayout(tp_size) for tp_size in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)]


def problem(plan: NativePlan, ranks: RankLayout) -> str | None:
    try:
        check_layout(plan.description, ranks)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_what_is_accepted_can_be_built(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, changes = MODELS[name]
    config = json.loads((KERNELS / file).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    accepted = 0
    for ranks in LAYOUTS:
        plan = plan_for(tmp_path, tp_size=ranks.tp_size)
        if problem(plan, ranks) is not None:
            continue
        accepted += 1
        for rank in range(ranks.tp_size):
            of_rank = groups_of(ranks, rank)
            monkeypatch.setattr(parallel_state, "groups", lambda of_rank=of_rank: of_rank)
            CausalLM(plan, device="meta")
    assert accepted >= 3


@pytest.mark.parametrize(
    ("name", "tp_size", "message"),
    [
        # 43 heads of 192 rows are no whole blocks.
        ("deepseek_v3", 3, r"cuts model.layers.0.self_attn.q_b_proj within groups of 128 rows .*\(fp8_block\); what"),
        ("narrow_heads", 5, "cuts model.layers.0.self_attn.k_proj within groups of 128 rows"),
        ("nemotron", 16, "--tp-size 16 does not divide the model's 8 groups of Mamba-2 heads"),
    ],
)
def test_what_would_be_cut_is_named(name: str, tp_size: int, message: str, tmp_path: Path) -> None:
    file, changes = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(json.loads((KERNELS / file).read_text()) | changes))
    with pytest.raises(UserError, match=message):
        check_layout(plan_for(tmp_path).description, RankLayout(tp_size))
