"""What a config.json is described as: parameters as in the published models, caches and bytes by hand."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.configs.hf_config import select_text_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization import detect
from sglang.srt.errors import UserError
from sglang.srt.plan.cache_spec import Window
from sglang.srt.plan.caches import CacheGroup, cache_groups
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import LayoutProblem, check_layout, larger_layouts, uneven_heads
from sglang.srt.plan.model_description import ModelDescription, describe_model
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.plan.needs import key_of_experts, needs_of
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK, HeadShares, RankLayout
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import configs

CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
BF16 = ParallelConfig("bfloat16", "bfloat16")


def published(name: str, **changes: Any) -> dict[str, Any]:
    """The config in 16 bits, with `changes` in its text part."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    config.pop("quantization_config", None)
    text = config.get("text_config", config)
    text.pop("quantization_config", None)
    text.update(changes)
    return config


def describe(name: str, **changes: Any) -> ModelDescription:
    return describe_model(published(name, **changes), None)


# --- parameters -------------------------------------------------------------------------------------------------------

BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "compress_ratios")


def with_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The text part with its first layers only."""
    text = copy.deepcopy(select_text_config(config)) | {"num_hidden_layers": num_layers}
    return text | {key: text[key][:num_layers] for key in BY_LAYER if text.get(key) is not None}


def transformers_parameters(config: dict[str, Any]) -> int:
    """Of the model that transformers builds, without allocating it; what routers hold as buffers counts too."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(config))
    buffers = [tensor for name, tensor in model.named_buffers() if "rotary" not in name]
    return sum(tensor.numel() for tensor in [*model.parameters(), *buffers])


def elements(weights: Weights) -> int:
    return sum(
        part.count
        if isinstance(part, Elements)
        else max(1, part.experts) * (part.rows * part.cols + part.bias * part.rows)
        for part in weights
    )


def described_parameters(model: ModelDescription) -> int:
    hidden = model.hidden_size
    total = model.vocab_size * hidden * (1 if model.tie_embeddings else 2) + hidden
    total += elements(model.layers[-1].residual.head_weights(hidden))
    for layer in model.layers:
        rows = layer.ffn.intermediate_size if isinstance(layer.ffn, MoE) else 0
        total += (
            2 * hidden + elements(layer.mixer.weights(hidden, 1)) + elements(layer.ffn.weights(hidden, ONE_RANK, rows))
        )
        total += elements(layer.residual.weights(hidden))
    return total


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("glm47", 4),
        ("kimi_k25", 2),
        ("deepseek_v32", 4),
        ("deepseek_v4", 5),
        ("glm5", 4),
        ("gpt_oss", 2),
        ("minimax_m2", 2),
        ("qwen35", 4),
        ("qwen3_moe", 2),
        ("qwen3", 2),
    ],
)
def test_parameters_are_those_of_the_published_architecture(name: str, num_layers: int) -> None:
    config = with_layers(published(name), num_layers)
    assert described_parameters(describe_model(config, None)) == transformers_parameters(config)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_indexers_that_are_shared_have_no_cache() -> None:
    types = ["full", "shared", "shared", "full"] * 20
    layers = describe("glm5", indexer_types=types[:78]).layers
    names = [[cache.name for cache in layer.mixer.caches(BF16)] for layer in layers[:4]]
    assert names == [["latent", "index"], ["latent"], ["latent"], ["latent", "index"]]


# --- caches -----------------------------------------------------------------------------------------------------------


def groups_of(name: str, parallel: ParallelConfig = BF16) -> dict[str, CacheGroup]:
    return {", ".join(group.names): group for group in cache_groups(describe(name), parallel)}


def test_latent_caches_are_held_by_every_rank() -> None:
    (one,) = cache_groups(describe("kimi_k25"), BF16)
    (eight,) = cache_groups(describe("kimi_k25"), ParallelConfig("bfloat16", "fp8_e4m3", 1, RankLayout(8)))
    assert one.bytes_per_entry == 61 * 576 * 2 and eight.bytes_per_entry == 61 * 576


def test_the_indexers_keys_are_cached() -> None:
    (group,) = cache_groups(describe("deepseek_v32"), BF16)
    assert group.names == ("latent", "index")
    assert group.bytes_per_entry == 61 * (576 * 2 + 128 + 4), "keys have one byte an element, and a scale"
    (quantized,) = cache_groups(describe("deepseek_v32"), ParallelConfig("bfloat16", "fp8_e4m3"))
    assert quantized.bytes_per_entry == 61 * (512 + 4 * 4 + 64 * 2 + 128 + 4), "latents are packed with their scales"
    (wide,) = cache_groups(describe("deepseek_v32"), ParallelConfig("float32", "float32"))
    assert wide.bytes_per_entry == 61 * (576 + 128) * 4


def test_compressed_entries_of_deepseek_v4() -> None:
    groups = groups_of("deepseek_v4")
    fourth, hundredth = groups["compressed, index"], groups["compressed"]
    assert (fourth.entries_per_token, fourth.bytes_per_entry) == (Fraction(1, 4), 21 * (512 + 128) * 2)
    assert (hundredth.entries_per_token, hundredth.bytes_per_entry) == (Fraction(1, 128), 20 * 512 * 2)
    assert groups["kv"].lifetime == Window(128) and groups["kv"].num_caches == 43
    cost = cache_cost(tuple(groups.values()))
    assert cost.bytes_per_token == 21 * 320 + 20 * 8
    assert cost.tokens_in(cost.pool_bytes(1_000_000)) == 1_000_000


# --- needs ------------------------------------------------------------------------------------------------------------


def test_needs_say_which_shapes_linear_layers_have() -> None:
    held = rank_weights(describe("qwen3"), RankLayout(4))
    (linear,) = [
        need for need in needs_of(held, ParallelConfig("bfloat16", "bfloat16", 1, RankLayout(4))) if need.shapes
    ]
    shapes = [(1536, 4096), (4096, 1024), (4096, 3072), (6144, 4096), (37984, 4096)]
    assert linear.shapes == tuple((rows, cols, False) for rows, cols in shapes)


def test_ops_of_several_shapes_have_needs_of_their_own() -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 64}
    model = describe("qwen3", per_layer_config={"1": {"head_dim": 256, "num_key_value_heads": 4}}, **changes)
    keys = [need.key for need in needs_of(rank_weights(model, ONE_RANK), BF16) if "attention" in need.op]
    variants = ["extend_attention/256x256", "decode_attention/256x256"]
    assert keys == ["extend_attention", "decode_attention", *variants]


def test_experts_of_layers_that_differ_in_their_latents_alone_have_needs_of_their_own() -> None:
    """The first three layers of experts have latents of 1024, 512 and 1024 numbers, and of the third a token chooses
    fewer: each finds the need of its own."""
    config = configs()["NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16"]
    sizes = {"moe_intermediate_size": 768, "n_routed_experts": 64, "num_experts_per_tok": 8, "moe_latent_size": 1024}
    changes: list[dict[str, Any]] = [{}, {"moe_latent_size": 512}, {"num_experts_per_tok": 6}]
    config["block_configs"] = [
        {"block_type": "attention"},
        *({"block_type": "moe"} | sizes | change for change in changes),
    ]
    model = describe_model(config | {"num_hidden_layers": 4}, None)
    held = rank_weights(model, ONE_RANK)
    needs = {need.key: need for need in needs_of(held, BF16) if need.op == "fused_moe"}
    assert len(needs) == len(changes)
    for weights, layer, change in zip(held.layers[1:], model.layers[1:], changes, strict=True):
        spec = layer.ffn.experts
        assert spec is not None
        _, down = [part for part in weights if isinstance(part, Matrix) and part.experts]
        found = needs[key_of_experts(needs, down, spec.top_k, None)]
        size = (sizes | change)["moe_latent_size"]
        assert found.shapes == ((768, size, False), (size, 768, False)) and found.experts[1] == spec.top_k


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("vocab_size", 10**10),
        ("num_attention_heads", 10**6),
        ("max_position_embeddings", 10**15),
        ("intermediate_size", 10**9),
        ("num_key_value_heads", 10**5),
        ("head_dim", 10**6),
    ],
)
def test_sizes_of_no_model_are_refused_at_once(key: str, value: int, tmp_path: Path) -> None:
    config = published("qwen3") | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ServerArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy")
    with pytest.raises(UserError, match=f"'{key}' must be between 0 and [0-9,]+; got {value}"):
        describe_served_model(args, ModelConfig.from_server_args(args))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 10**9},
        {"num_experts_per_tok": 10**7},
        {"moe_intermediate_size": 10**9},
        {"decoder_sparse_step": 10**9},
        {"num_experts": -1},
    ],
)
def test_numbers_of_experts_are_bounded(changes: dict[str, int], tmp_path: Path) -> None:
    config = published("qwen3_moe") | changes
    with pytest.raises(UserError, match="must be between 0 and"):
        describe_model(config, None)


def test_rotary_scaling_does_not_pass_the_bound(tmp_path: Path) -> None:
    config = published("qwen3") | {"rope_scaling": {"rope_type": "linear", "factor": 1e9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="with its rotary scaling: 'max_position_embeddings' must be between"):
        ModelConfig.from_server_args(ServerArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*M-"}, r"'hybrid_override_pattern' \(Mamba-2 layers"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types chunked_attention are not described"),
        ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries for 36 layers"),
    ],
)
def test_layers_that_nobody_describes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe("qwen3", **changes)


@pytest.mark.parametrize(
    ("name", "tp_size", "problem", "works", "staged"),
    [
        ("qwen3", 40, "--tp-size 40 is more than the model's 32 attention heads", "1 to 32", (20, 10, 8, 5, 4, 2)),
        (
            "minimax_m2",
            12,
            "--tp-size 12 is no multiple of the model's 8 KV heads, over all of which keys are normed",
            "1 to 8, 16, 24",
            (6, 4, 3, 2, 1),
        ),
        (
            "qwen35",
            32,
            "--tp-size 32 does not divide the model's 16 key heads of gated delta nets",
            "1, 2, 4, 8, 16",
            (16, 8, 4, 2, 1),
        ),
    ],
)
def test_refused_layouts_name_those_that_work(
    name: str, tp_size: int, problem: str, works: str, staged: tuple[int, ...]
) -> None:
    model = describe(name, **({"num_attention_heads": 32} if name == "qwen35" else {}))
    with pytest.raises(UserError) as error:
        check_layout(model, RankLayout(tp_size))
    stages = "".join(f"{RankLayout(size, pp_size=tp_size // size).flags} or " for size in staged)
    assert str(error.value) == f"{problem}; what works: {stages}--tp-size {works}"
    for size in staged:
        check_layout(model, RankLayout(size, pp_size=tp_size // size))
    for run in works.split(", "):
        first, _, last = run.partition(" to ")
        for size in range(int(first), int(last or first) + 1):
            check_layout(model, RankLayout(size))


@pytest.mark.parametrize("tp_size", [3, 6])
def test_heads_that_do_not_divide_are_shared_out_whole(tp_size: int) -> None:
    """GLM-4.7: 96 query heads and 8 kv heads; intermediate sizes of 12,288 and 1,536."""
    model, ranks = describe("glm47"), RankLayout(tp_size)
    check_layout(model, ranks)
    shares = model.layers[0].mixer.shares(tp_size)  # type: ignore[attr-defined]
    kv_heads = [shares.kv_heads(rank).run for rank in range(tp_size)]
    assert [head for run in kv_heads for head in range(run.start, run.stop)] == list(range(8))
    for rank, kv in enumerate(kv_heads):
        heads = shares.heads(rank)
        assert (heads.run.start, heads.run.stop) == (12 * kv.start, 12 * kv.stop) and heads.count <= heads.padded_count
    most = {3: 36, 6: 24}[tp_size]
    assert uneven_heads(model, tp_size) == (
        f"96 attention heads over {tp_size} ranks, with whole KV heads (8): the busiest has {most}, the average"
        f" {96 / tp_size:.1f}"
    )
    assert uneven_heads(model, 4) is None


@pytest.mark.parametrize("tp_size", range(1, 33))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 4), (32, 1), (32, 32), (36, 12)])
def test_every_head_is_on_one_rank_with_its_kv_head(num_heads: int, num_kv_heads: int, tp_size: int) -> None:
    shares = HeadShares(num_heads, num_kv_heads, tp_size)
    heads = [shares.heads(rank) for rank in range(tp_size)]
    assert [head for share in heads for head in range(share.run.start, share.run.stop)] == list(range(num_heads))
    for rank, share in enumerate(heads):
        kv, room = shares.kv_heads(rank), share.padded_count // shares.padded_kv_heads
        assert (
            0 < share.count <= share.padded_count == shares.padded_heads
            and 0 < kv.count <= kv.padded_count == shares.padded_kv_heads
        )
        # The kernels take query head i of a rank to attend with its kv head i // room.
        local = [(head - share.run.start) // room + kv.run.start for head in range(share.run.start, share.run.stop)]
        assert local == [head // shares.group for head in range(share.run.start, share.run.stop)]


@pytest.mark.parametrize(
    ("size", "tp_size", "group", "share"),
    [
        (12288, 3, 128, 4096),
        (12288, 6, 1, 2048),
        (11008, 3, 1, 3712),
        (11008, 6, 128, 1920),  # 86 blocks over six ranks: 15 or 14 each
        (10944, 8, 1, 1368),  # an even share, if of no whole vectors
        (10944, 8, 128, 1408),  # the last block is half of one
        (512, 3, 128, 256),
        (34, 5, 1, 7),  # no whole vectors for all
    ],
)
def test_shares_of_intermediate_dims(size: int, tp_size: int, group: int, share: int) -> None:
    mlp = Dense(size, scale_group=group)
    shares = [mlp.share(rank, tp_size) for rank in range(tp_size)]
    dims = [dim for s in shares for dim in range(s.run.start, s.run.stop)]
    assert dims == list(range(size)) and {s.padded_count for s in shares} == {share}
    assert all(0 < s.count <= share and s.run.start % group == 0 for s in shares)


def test_too_few_groups_of_dims_are_refused() -> None:
    with pytest.raises(UserError, match="size 384 in groups of 128 that share scales is too few for 4 tensor-parallel"):
        Dense(384, scale_group=128).padded_rows(4)


def test_whole_experts_where_scales_forbid_shares() -> None:
    """Qwen3-30B-A3B's experts are six blocks of 128 wide."""
    config = published("qwen3_moe")
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config |= {"quantization_config": quant}
    model = describe_model(config, detect(config, Path()))
    with pytest.raises(UserError) as error:
        check_layout(model, RankLayout(4))
    assert str(error.value) == (
        "expert intermediate size 768 in groups of 128 that share scales (fp8_block) is too few for 4 tensor-parallel"
        " ranks: one would hold none of 6; what works: --tp-size 4 --ep-size 2 or --tp-size 4 --ep-size 4 or"
        " --tp-size 2 --pp-size 2 or --tp-size 1 --pp-size 4 or --tp-size 1 to 3, 6"
    )
    for ranks in (RankLayout(4, 2), RankLayout(4, 4), RankLayout(1), RankLayout(2)):
        check_layout(model, ranks)
    assert next(larger_layouts(model, RankLayout(2))) == RankLayout(4, 2)


@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size", "message"),
    [
        ("qwen3", 2, 2, "--ep-size 2 shares out experts, and the model has none; what works: --tp-size 1 to 4"),
        (
            "qwen3_moe",
            4,
            3,
            "--ep-size 3 does not divide --tp-size 4, whose ranks share the experts; what works: "
            "--tp-size 6 --ep-size 3 or --tp-size 4 --ep-size 2 or --tp-size 4 --ep-size 4 or --tp-size 1 to 8",
        ),
        (
            "qwen3_moe",
            1,
            2,
            "--ep-size 2 does not divide --tp-size 1, whose ranks share the experts; what works: "
            "--tp-size 2 --ep-size 2 or --tp-size 1, 2",
        ),
        ("mixtral", 16, 16, "--ep-size 16 is more than the model's 8 experts; what works: "),
    ],
)
def test_refused_ways_to_share_experts(name: str, tp_size: int, ep_size: int, message: str) -> None:
    model = describe("qwen3_moe", num_experts=8) if name == "mixtral" else describe(name)
    with pytest.raises(UserError) as error:
        check_layout(model, RankLayout(tp_size, ep_size))
    assert str(error.value).startswith(message)


def test_states_are_of_a_known_type() -> None:
    with pytest.raises(UserError, match="'mamba_ssm_dtype' must be one of float32, bfloat16, float16; got 'int8'"):
        describe("qwen35", mamba_ssm_dtype="int8")


def test_larger_layouts_divide_the_model_and_fit_a_machine() -> None:
    assert next(larger_layouts(describe("glm47"), RankLayout(4))) == RankLayout(8)
    assert list(larger_layouts(describe("qwen3"), RankLayout(16))) == []
    assert list(larger_layouts(describe("glm47"), RankLayout(1), 1)) == []
    assert {layout.tp_size for layout in larger_layouts(describe("glm47"), RankLayout(1), 4)} == {2, 3, 4}


# --- cached tokens that ranks share out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "problem"),
    [
        ("kimi_k25", RankLayout(8, dcp_size=3), "--dcp-size 3 does not divide --tp-size 8, whose ranks share out"),
        ("kimi_k25", RankLayout(dcp_size=2), "--dcp-size 2 does not divide --tp-size 1"),
        ("glm47", RankLayout(8, dcp_size=2), "with --tp-size 8 no 2 ranks hold the same of the model's 8 KV heads"),
        ("deepseek_v4", RankLayout(8, dcp_size=2), "--dcp-size 2: entries that stand for several tokens are whole"),
    ],
)
def test_tokens_that_cannot_be_shared_out_are_refused_by_name(name: str, ranks: RankLayout, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        check_layout(describe(name), ranks)
    works = str(refused.value).rpartition("what works: ")[2]
    assert (name == "kimi_k25" and ranks.tp_size == 8) == (
        "--tp-size 8 --dcp-size 8 or --tp-size 8 --dcp-size 4" in works
    )


def test_the_ranks_of_a_group_share_out_its_tokens() -> None:
    model = describe("kimi_k25")
    check_layout(model, RankLayout(8, dcp_size=4, attn_dp_size=2))
    with pytest.raises(LayoutProblem, match="--dcp-size 8 does not divide --tp-size 8 in 2 groups of 4") as raised:
        check_layout(model, RankLayout(8, dcp_size=8, attn_dp_size=2))
    assert "what works: --tp-size 8 --dcp-size 4 --attn-dp-size 2 or" in str(raised.value)


def test_shared_out_tokens_take_their_share_of_the_memory() -> None:
    """Latents by as many ranks as share them; of KV heads those that several ranks hold; an indexer's keys by none."""
    for name, tp_size, dcp_size, shares in (
        ("kimi_k25", 8, 8, {"latent": (8, 8)}),
        ("kimi_k25", 8, 2, {"latent": (2, 2)}),
        ("deepseek_v32", 8, 4, {"latent": (4, 4), "index": (1, 1)}),
        ("minimax_m2", 16, 2, {"kv": (2, 2)}),
    ):
        whole, shared = (
            cache_groups(describe(name), ParallelConfig("bfloat16", "bfloat16", 1, RankLayout(tp_size, dcp_size=size)))
            for size in (1, dcp_size)
        )
        got = {group.names: (group.dcp_size, group.entries_per_token.denominator) for group in shared}
        assert got == {(cache,): share for cache, share in shares.items()}
        assert sum(g.bytes_per_entry for g in shared) == sum(g.bytes_per_entry for g in whole)
        assert any(f"{dcp_size} ranks share the tokens out" in str(group) for group in shared)
