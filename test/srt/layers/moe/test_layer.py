"""The whole block against those of transformers, on one rank and on several."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.blocks.moe.spec import MoE, Router, Shared
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, Activation
from sglang.srt.errors import UserError
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_names import WeightMap

from .expert_checkpoint import FUSED_ONLY, LAYER, W123, WEIGHTS, Loaded, Tensors, save

HIDDEN, INTER, EXPERTS, TOP_K = 32, 48, 12, 3


def hf_block(family: str, config_name: str, class_name: str, *args: Any, **config: Any) -> torch.nn.Module:
    """A block of transformers with every parameter and buffer random."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(configs, config_name)(hidden_size=HIDDEN, num_experts_per_tok=TOP_K, **config)
    made._experts_implementation = "eager"
    block = getattr(module, class_name)(made, *args).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.5 if "correction" in name else 0.2)
    return block


def published(block: torch.nn.Module, weights: WeightMap) -> Tensors:
    """The block's tensors as checkpoints of the family name them, experts one by one."""
    tensors: Tensors = {}
    for name, tensor in block.state_dict().items():
        if name == "experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            for part, stack in (("gate", gate), ("up", up)):
                for e, weight in enumerate(stack):
                    tensors[_expert(weights, e, part)] = weight
        elif name == "experts.down_proj":
            tensors |= {_expert(weights, e, "down"): weight for e, weight in enumerate(tensor)}
        else:
            tensors[f"{LAYER}mlp.{name}"] = tensor
    return tensors


def _expert(weights: WeightMap, expert: int, part: str) -> str:
    template = weights.layer["moe.w13"]
    return LAYER + template.format(expert=expert, part=weights.parts.get(part, part)) + ".weight"


def run(
    spec: MoE, folder: Path, x: torch.Tensor, weights: WeightMap = WEIGHTS, *, ranks: int = 1, **options: Any
) -> torch.Tensor:
    batch = options.pop("batch", None)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        layer = Loaded(spec, HIDDEN, {"vocab_size": 90}, folder, weights, rank=rank, ranks=RankLayout(ranks), **options)
        total += layer.load(folder)(x, batch)
    return total


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("family", "prefix", "groups"), [("deepseek_v3", "DeepseekV3", (4, 2)), ("glm4_moe", "Glm4Moe", (1, 1))]
)
def test_deepseek_v3_and_glm4(
    family: str, prefix: str, groups: tuple[int, int], fuse: bool, ranks: int, tmp_path: Path
) -> None:
    block = hf_block(
        family,
        f"{prefix}Config",
        f"{prefix}MoE",
        moe_intermediate_size=INTER,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    save(tmp_path, published(block, WEIGHTS))
    router = Router(
        TOP_K,
        "sigmoid",
        scale=2.5,
        num_groups=groups[0],
        top_groups=groups[1],
        correction="e_score_correction_bias",
        float32=True,
    )
    spec = MoE(EXPERTS, INTER, router, shared=Shared(INTER))
    x = torch.randn(20, HIDDEN)
    got = run(spec, tmp_path, x, ranks=ranks, fuse=fuse)
    torch.testing.assert_close(got, block(x[None])[0], rtol=1e-5, atol=1e-4)


V4 = {"moe_intermediate_size": INTER, "n_routed_experts": EXPERTS, "routed_scaling_factor": 1.5, "vocab_size": 90}


@torch.inference_mode()
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("hashed", [True, False])
def test_deepseek_v4(hashed: bool, fuse: bool, tmp_path: Path) -> None:
    """With clamps so low that they matter."""
    kinds = ["hash_moe" if hashed else "moe"]
    block = hf_block(
        "deepseek_v4",
        "DeepseekV4Config",
        "DeepseekV4SparseMoeBlock",
        0,
        num_hidden_layers=1,
        mlp_layer_types=kinds,
        swiglu_limit=0.7,
        **V4,
    )
    if hashed:
        block.gate.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(90)]))
    tensors = published(block, W123)
    for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors[f"{LAYER}mlp.shared_experts.{ours}.weight"] = tensors.pop(f"{LAYER}mlp.shared_experts.{theirs}.weight")
    save(tmp_path, tensors)
    choice = {"hash_table": "tid2eid"} if hashed else {"correction": "e_score_correction_bias"}
    router = Router(TOP_K, "sqrtsoftplus", scale=1.5, **choice)
    spec = MoE(EXPERTS, INTER, router, Activation(limit=0.7), shared=Shared(INTER))
    x, tokens = torch.randn(20, HIDDEN), torch.randint(0, 90, (20,))
    batch = SimpleNamespace(input_ids=tokens, num_valid_tokens=None)
    got = run(spec, tmp_path, x, W123, fuse=fuse, batch=batch)
    want = block(x[None], tokens[None])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    # Padding gets nothing from routed experts, nor from a shared one among them.
    batch.num_valid_tokens = torch.tensor([15], dtype=torch.int32)
    padded = run(spec, tmp_path, x, W123, fuse=fuse, batch=batch)
    torch.testing.assert_close(padded[:15], want[:15], rtol=1e-5, atol=1e-4)
    assert (padded[15:] == 0).all() == fuse


def test_a_hash_table_that_names_no_expert(tmp_path: Path) -> None:
    spec = MoE(4, INTER, Router(2, "sqrtsoftplus", hash_table="tid2eid"))
    tensors = {_expert(W123, e, part): torch.zeros(INTER, HIDDEN) for e in range(4) for part in ("gate", "up")}
    tensors |= {_expert(W123, e, "down"): torch.zeros(HIDDEN, INTER) for e in range(4)}
    tensors[LAYER + "mlp.gate.weight"] = torch.zeros(4, HIDDEN)
    tensors[LAYER + "mlp.gate.tid2eid"] = torch.full((90, 2), 4)
    save(tmp_path, tensors)
    with pytest.raises(UserError, match=r"model.layers.3.mlp.gate.tid2eid names experts 4 to 4; there are 4"):
        run(spec, tmp_path, torch.zeros(1, HIDDEN), W123)


@torch.inference_mode()
def test_gpt_oss(tmp_path: Path) -> None:
    block = hf_block("gpt_oss", "GptOssConfig", "GptOssMLP", intermediate_size=INTER, num_local_experts=EXPERTS)
    save(tmp_path, {f"{LAYER}mlp.{name}": tensor for name, tensor in block.state_dict().items()})
    spec = MoE(EXPERTS, INTER, Router(TOP_K, bias=True), GPT_OSS_SWIGLU, bias=True, form="gpt_oss")
    x = torch.randn(20, HIDDEN)
    for ranks in (1, 2):
        got = run(spec, tmp_path, x, FUSED_ONLY, ranks=ranks)
        torch.testing.assert_close(got, block(x[None])[0][0], rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_minimax_m2(tmp_path: Path) -> None:
    block = hf_block(
        "minimax_m2", "MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", intermediate_size=INTER, num_local_experts=EXPERTS
    )
    names = W123.layer | {"moe.correction": "mlp"}
    weights = WeightMap({}, names, parts=W123.parts)
    save(tmp_path, published(block, weights))
    spec = MoE(EXPERTS, INTER, Router(TOP_K, "sigmoid", correction="e_score_correction_bias"))
    x = torch.randn(20, HIDDEN)
    torch.testing.assert_close(run(spec, tmp_path, x, weights), block(x[None])[0], rtol=1e-5, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [1, 2])
def test_qwen3_5(ranks: int, tmp_path: Path) -> None:
    block = hf_block(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeSparseMoeBlock",
        num_experts=EXPERTS,
        moe_intermediate_size=INTER,
        shared_expert_intermediate_size=64,
    )
    save(tmp_path, {f"{LAYER}mlp.{name}": tensor for name, tensor in block.state_dict().items()})
    weights = WeightMap(
        {},
        WEIGHTS.layer
        | {"moe.shared.gate_up": "mlp.shared_expert.{part}_proj", "moe.shared.down": "mlp.shared_expert.down_proj"},
    )
    spec = MoE(EXPERTS, INTER, Router(TOP_K), shared=Shared(64, gated=True), form="stacked")
    x = torch.randn(20, HIDDEN)
    got = run(spec, tmp_path, x, weights, ranks=ranks)
    torch.testing.assert_close(got, block(x[None])[0], rtol=1e-5, atol=1e-4)


def test_why_a_shared_expert_is_apart(tmp_path: Path) -> None:
    router = Router(TOP_K)
    for spec, fuse, reason in (
        (MoE(4, INTER, router, shared=Shared(INTER)), False, "--disable-shared-experts-fusion"),
        (MoE(4, INTER, router, shared=Shared(INTER, gated=True)), True, "it has a gate of its own"),
        (MoE(4, INTER, router, shared=Shared(96)), True, "its intermediate size is 96, theirs 48"),
        (MoE(4, INTER, router, shared=Shared(INTER), form="stacked"), True, "keeps the experts together"),
    ):
        apart = Loaded(spec, HIDDEN, {}, tmp_path, fuse=fuse).described.shared_apart
        assert apart is not None and reason in apart


@pytest.mark.parametrize(
    ("router", "problem"),
    [
        (Router(2, num_groups=5), "12 experts do not divide into 5 groups"),
        (Router(2, "sigmoid", num_groups=4, top_groups=5), "5 of 4 groups cannot be chosen"),
        (Router(2, "sigmoid", num_groups=12, top_groups=6), "ranked by their two best experts and have one"),
        (Router(7, "sigmoid", num_groups=4, top_groups=2), "7 experts cannot be chosen from 2 groups of 3"),
        (Router(2, correction="bias"), "softmax routing has no correction bias"),
    ],
)
def test_routers_that_cannot_be(router: Router, problem: str) -> None:
    assert any(problem in said for said in router.problems(12))


def test_published_routers_can_be() -> None:
    assert not Router(8, "sigmoid", num_groups=8, top_groups=4, correction="b").problems(256)
    assert not Router(8, "sigmoid", correction="b").problems(160)
    assert not Router(6, "sqrtsoftplus", hash_table="tid2eid").problems(256)
