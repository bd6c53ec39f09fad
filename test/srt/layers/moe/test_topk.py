"""Routing: the torch ops against the routers of transformers, the kernels against the torch ops."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch

from sglang import explain
from sglang.srt.blocks.moe import reference as routing
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.blocks.moe.reference import ImageCorrection

DEVICE = interpreter.DEVICE
HIDDEN = 32


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# --- against transformers ---------------------------------------------------------------------------------------------


def hf_router(family: str, config_name: str, class_name: str, **config: Any) -> torch.nn.Module:
    """A router of transformers with every parameter and buffer random."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    router = getattr(module, class_name)(getattr(configs, config_name)(hidden_size=HIDDEN, **config))
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.3)
    return router.eval()


def assert_same_routing(
    got: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> None:
    """Equal as maps from expert to weight: the order of the choices does not matter."""

    def spread(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(w), num_experts).scatter_(1, i.long(), w.float())

    assert got[0].dtype == torch.float32 and got[1].dtype == torch.int32
    torch.testing.assert_close(spread(*got), spread(weights, ids), rtol=1e-5, atol=1e-6)


GROUPED = {"n_group": 8, "topk_group": 4, "n_routed_experts": 64, "num_experts_per_tok": 6, "norm_topk_prob": True}
SIGMOID_ROUTERS = [
    ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", GROUPED | {"routed_scaling_factor": 2.5}),
    ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", GROUPED | {"norm_topk_prob": False}),
    ("deepseek_v32", "DeepseekV32Config", "DeepseekV32TopkRouter", GROUPED | {"routed_scaling_factor": 2.5}),
    ("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaTopkRouter", GROUPED | {"n_group": 1, "topk_group": 1}),
    (
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeTopkRouter",
        {"n_routed_experts": 20, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
]


@torch.inference_mode()
@pytest.mark.parametrize(("family", "config_name", "class_name", "config"), SIGMOID_ROUTERS)
def test_sigmoid_is_the_router_of_transformers(
    family: str, config_name: str, class_name: str, config: dict[str, Any]
) -> None:
    router = hf_router(family, config_name, class_name, **config)
    x = torch.randn(50, HIDDEN)
    logits, weights, ids = router(x)
    got = routing.topk_sigmoid(
        logits,
        router.e_score_correction_bias,
        router.top_k,
        router.norm_topk_prob,
        (router.num_group, router.topk_group),
        router.routed_scaling_factor,
    )
    assert_same_routing(got, weights, ids, router.num_experts)


@torch.inference_mode()
def test_sigmoid_without_groups_is_minimax() -> None:
    config = {"num_local_experts": 24, "num_experts_per_tok": 4, "intermediate_size": 16}
    router = hf_router("minimax_m2", "MiniMaxM2Config", "MiniMaxM2TopKRouter", **config)
    bias = torch.randn(24)
    logits, weights, ids = router(torch.randn(50, HIDDEN), bias)
    assert_same_routing(routing.topk_sigmoid(logits, bias, 4, True), weights, ids, 24)


@torch.inference_mode()
def test_softmax_over_the_chosen_is_gpt_oss() -> None:
    config = {"num_local_experts": 16, "num_experts_per_tok": 4}
    router = hf_router("gpt_oss", "GptOssConfig", "GptOssTopKRouter", **config)
    logits, weights, ids = router(torch.randn(50, HIDDEN))
    assert_same_routing(routing.topk_softmax(logits, 4, True), weights, ids, 16)


@torch.inference_mode()
def test_softmax_is_qwen() -> None:
    config = {"num_experts": 16, "num_experts_per_tok": 4}
    router = hf_router("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTopKRouter", **config)
    logits, weights, ids = router(torch.randn(50, HIDDEN))
    assert_same_routing(routing.topk_softmax(logits, 4, True), weights, ids, 16)


V4 = {"n_routed_experts": 24, "num_experts_per_tok": 6, "routed_scaling_factor": 1.5, "vocab_size": 100}


@torch.inference_mode()
def test_sqrtsoftplus_is_deepseek_v4() -> None:
    router = hf_router("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter", **V4)
    logits, weights, ids = router(torch.randn(50, HIDDEN))
    bias = router.e_score_correction_bias
    assert_same_routing(routing.topk_sqrtsoftplus(logits, bias, 6, True, scale=1.5), weights, ids, 24)


@torch.inference_mode()
def test_hash_routing_is_deepseek_v4() -> None:
    router = hf_router("deepseek_v4", "DeepseekV4Config", "DeepseekV4HashRouter", **V4)
    table = torch.stack([torch.randperm(24)[:6] for _ in range(100)])
    router.tid2eid.copy_(table)
    tokens = torch.randint(0, 100, (50,))
    logits, weights, ids = router(torch.randn(50, HIDDEN), tokens)
    got = routing.topk_hash(logits, tokens, table.int(), "sqrtsoftplus", 1.5)
    assert torch.equal(got[1].long(), ids)
    assert_same_routing(got, weights, ids, 24)


# --- which kernel -----------------------------------------------------------------------------------------------------

MODEL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100, "head_dim": 64}
MODEL |= {"num_key_value_heads": 2, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({"model_type": "glm4_moe"}, {"topk_sigmoid"}),
        ({"model_type": "gpt_oss", "sliding_window": 128}, {"topk_softmax"}),
    ],
)
def test_explain_names_a_kernel_for_every_routing(
    config: dict[str, Any], ops: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config |= {"max_position_embeddings": 4096, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | config))
    for arch, kernel in (("sm_120", "triton"), ("cpu", "torch_native")):
        status = explain.main(["--arch", arch, "--model-path", str(tmp_path), "--json"])
        assert status == explain.WOULD_NOT_START  # no architecture is called X
        found = json.loads(capsys.readouterr().out)["ops"]
        assert {op: found[op]["kernel"] for op in found if op.startswith("topk")} == dict.fromkeys(ops, kernel)


# --- kernels ----------------------------------------------------------------------------------------------------------


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.int32
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=1e-7)


def random_logits(num_tokens: int, num_experts: int, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(num_tokens, num_experts) * scale).to(DEVICE)


# (experts, choices, groups, best groups): of published models, and sizes that no block divides.
SHAPES = [(256, 8, 8, 4), (160, 8, 1, 1), (384, 8, 1, 1), (60, 4, 6, 2), (36, 5, 3, 3), (8, 1, 4, 1)]


@interpreter.kernel_test
@pytest.mark.pairs
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("experts", "k", "groups", "best"), SHAPES)
def test_biased_scores(score: str, experts: int, k: int, groups: int, best: int, renormalize: bool) -> None:
    logits, bias = random_logits(7, experts), torch.randn(experts).to(DEVICE)
    args = (logits, bias, k, renormalize, (groups, best), 2.5)
    assert_same(getattr(topk, f"topk_{score}")(*args), getattr(routing, f"topk_{score}")(*args))


@interpreter.kernel_test
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_tokens_of_images_have_a_bias_of_their_own(score: str) -> None:
    """The biases choose different experts; padding has neither."""
    logits, ids = random_logits(6, 24), torch.tensor([7, 5, 7, 7, 5, 7], device=DEVICE)
    text, image = (torch.full((24,), -9.0, device=DEVICE) for _ in range(2))
    text[:6], image[12:] = 9.0, 9.0
    num_valid = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    args, of_images = (logits, text, 4, True, (1, 1), 1.5, True, num_valid), ImageCorrection(image, ids, 7)
    got = getattr(topk, f"topk_{score}")(*args, of_images=of_images)
    assert_same(got, getattr(routing, f"topk_{score}")(*args, of_images=of_images))
    chosen = got[1][:5, :4]
    assert torch.equal(chosen.min(1).values >= 12, ids[:5] == 7) and torch.equal(chosen.max(1).values < 6, ids[:5] == 5)


@interpreter.kernel_test
@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2)])
def test_scores_below_zero_keep_their_order(groups: int, best: int) -> None:
    """The kernel compares them as integers."""
    args = (random_logits(7, 24), torch.randn(24).to(DEVICE) - 4, 9, True, (groups, best), 2.5)
    assert_same(topk.topk_sigmoid(*args), routing.topk_sigmoid(*args))


@interpreter.kernel_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_bias_on_a_slice_of_rows(dtype: torch.dtype) -> None:
    wide = random_logits(5, 100, 1.0).to(dtype)
    if dtype == torch.bfloat16:  # distinct scores, or else the order among equals decides
        wide = (torch.stack([torch.randperm(100) for _ in range(5)]) / 16 - 3).to(DEVICE, dtype)
    logits = wide[:, 10:74]
    args = (logits, None, 6, True)
    assert_same(topk.topk_sigmoid(*args), routing.topk_sigmoid(*args))


@interpreter.kernel_test
def test_sqrtsoftplus_of_very_small_and_large_logits_keeps_its_precision() -> None:
    logits = torch.tensor([[-80.0, -40.0, -20.0, -10.0, 0.0, 10.0, 30.0, 90.0]], device=DEVICE)
    weights, ids = topk.topk_sqrtsoftplus(logits, None, 8, False)
    assert ids.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]]
    exact = torch.log1p(logits.double().exp()).sqrt().flip(1)
    assert ((weights.double() - exact) / exact).abs().max() < 3e-6


@interpreter.kernel_test
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_hash_routing(score: str, num_tokens: int) -> None:
    table = torch.stack([torch.randperm(20)[:6] for _ in range(50)]).int().to(DEVICE)
    args = (random_logits(num_tokens, 20), torch.randint(0, 50, (num_tokens,)).to(DEVICE), table, score, 1.5)
    assert_same(topk.topk_hash(*args), routing.topk_hash(*args))
    assert_same(topk.topk_hash(*args, True), routing.topk_hash(*args, True))


@interpreter.kernel_test
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("valid", [0, 3, 6])
def test_padding_and_the_shared_expert(with_shared: bool, valid: int) -> None:
    logits, bias = random_logits(6, 12), torch.randn(12).to(DEVICE)
    num_valid = torch.tensor([valid], dtype=torch.int32, device=DEVICE)
    for name, args in (
        ("topk_softmax", (logits, 3, True, 2.5)),
        ("topk_sigmoid", (logits, bias, 3, True, (4, 2), 2.5)),
        ("topk_sqrtsoftplus", (logits, bias, 3, True, (1, 1), 2.5)),
    ):
        weights, ids = getattr(topk, name)(*args, with_shared, num_valid)
        assert_same((weights, ids), getattr(routing, name)(*args, with_shared, num_valid))
        assert ids.shape == (6, 3 + with_shared)
        assert (ids[valid:] == -1).all() and not weights[valid:].any()
        assert (ids[:valid] >= 0).all()
        torch.testing.assert_close(weights[:valid, :3].sum(1), torch.full((valid,), 2.5, device=DEVICE))
        if with_shared:
            assert (ids[:valid, 3] == 12).all() and (weights[:valid, 3] == 1).all()


@interpreter.kernel_test
def test_equal_scores_name_distinct_experts_of_the_first_groups() -> None:
    weights, ids = topk.topk_sigmoid(torch.zeros(3, 16, device=DEVICE), None, 6, True, (4, 2))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert torch.allclose(weights, torch.tensor(1 / 6, device=DEVICE))


@interpreter.kernel_test
def test_nan_logits_name_experts_that_exist() -> None:
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    logits[1] = torch.arange(12.0)
    for groups in ((1, 1), (4, 2)):
        _, ids = topk.topk_sigmoid(logits, None, 4, True, groups)
        assert ((ids >= 0) & (ids < 12)).all()
        assert ids[1].tolist() == [11, 10, 9, 8]


@interpreter.kernel_test
def test_no_tokens() -> None:
    weights, ids = topk.topk_sigmoid(torch.empty(0, 12, device=DEVICE), None, 4, True)
    assert weights.shape == ids.shape == (0, 4)


@interpreter.in_two_parts
def test_in_interpreter(part: str) -> None:
    interpreter.run_file(__file__, part)
