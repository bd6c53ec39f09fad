"""The plan: sizes, memory arithmetic, messages. Synthetic GPUs and models; no torch."""

from __future__ import annotations

import ast
import itertools
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.spec import NoKernel
from sglang.srt.layers.ops import QUANTIZED_LINEAR, RMSNORM
from sglang.srt.plan.attention_memory import (
    FLASHINFER_LATENT_CHUNKS,
    FLASHINFER_LATENT_LISTS,
    FLASHINFER_LATENT_WORKSPACE,
    FLASHINFER_MLA_WORKSPACE,
    FLASHINFER_PLANS,
    FLASHINFER_WORKSPACE,
    INDEX_LOGIT_BYTES,
    LIST_BYTES_PER_PAGE,
    SPARSE_ROUNDS,
    AttentionSizes,
    attention_bytes,
)
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.defaults import cuda_graph_batch_sizes
from sglang.srt.plan.kv_spec import kv_cache_dtype
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.memory import PREFILL_GRAPH_PROMPTS
from sglang.srt.plan.model_description import describe_model
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.pool_sizes import cache_cost
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs

GIB = 1024**3
CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
QWEN3_8B = json.loads((CONFIGS / "qwen3.json").read_text())
TINY = QWEN3_8B | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "eos_token_id": 2, "max_position_embeddings": 512}
PACKAGES = frozenset({"triton"})


@pytest.fixture
def build(tmp_path: Path) -> Any:
    def make(config: dict[str, Any] = QWEN3_8B, arch: str = "sm_120", free: float = 94 * GIB, **flags: Any) -> Plan:
        (tmp_path / "config.json").write_text(json.dumps(config))
        packages = flags.pop("packages", PACKAGES)
        rank, probe = flags.pop("rank", 0), flags.pop("probe", None)
        flags_of_arch = flags.pop("traits", {})
        args = ServerArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy", **flags)
        model = ModelConfig.from_server_args(args)
        traits = replace(arch_by_name(arch), **flags_of_arch)
        return make_plan(args, model, traits, int(free), packages, rank=rank, probe=probe)

    return make


def spent(plan: Plan) -> int:
    return sum(value for name, value in asdict(plan.memory).items() if name != "available")


@pytest.mark.parametrize(
    ("arch", "free", "chunk", "graphs", "running"),
    [
        ("sm_120", 94, 8192, 512, 1024),
        ("rtx-5090", 31, 2048, 160, 256),
        ("l40s", 44, 4096, 256, 512),
        ("h200", 139, 8192, 512, 1024),
        ("gb10", 110, 8192, 512, 1024),
    ],
)
def test_defaults_follow_memory(build: Any, arch: str, free: int, chunk: int, graphs: int, running: int) -> None:
    plan = build(arch=arch, free=free * GIB)
    assert plan.chunked_prefill_size == chunk
    assert plan.cuda_graph_bs[-1] == graphs and plan.cuda_graph_bs[:4] == (1, 2, 4, 8)
    assert plan.max_running_requests == running
    assert plan.device == "cuda" and plan.page_size == 1 and plan.errors == ()
    assert spent(plan) <= plan.memory.available
    assert 0.5 < plan.memory.mem_fraction_static < 0.99


def test_the_pool_takes_what_is_left(build: Any) -> None:
    plan = build()
    assert spent(plan) > plan.memory.available - GIB // 64
    assert (plan.max_total_num_tokens + 1) * cache_cost(plan.caches).bytes_per_token <= plan.memory.kv_cache
    assert cache_cost(plan.caches).bytes_per_token == 36 * 8 * 256 * 2
    assert plan.memory.weights > 15 * GIB


def test_mem_fraction_static_is_obeyed(build: Any) -> None:
    plan = build(mem_fraction_static=0.5)
    assert plan.memory.weights + plan.memory.kv_cache == 47 * GIB


def test_unified_memory_leaves_the_machine_its_part(build: Any) -> None:
    """Published recipes for GB10 take 0.30 to 0.85 of its memory."""
    spark = build(arch="gb10", free=110 * GIB)
    card = build(arch="gb10", free=110 * GIB, traits={"unified_memory": False})
    assert spark.memory.reserve - card.memory.reserve == 110 * GIB // 8
    assert spark.memory.mem_fraction_static < 0.85 < card.memory.mem_fraction_static
    for fraction in (0.3, 0.85):
        asked = build(arch="gb10", free=110 * GIB, mem_fraction_static=fraction)
        assert asked.memory.mem_fraction_static == pytest.approx(fraction, abs=0.001)


def test_fp8_doubles_the_tokens(build: Any) -> None:
    half = build(kv_cache_dtype="fp8_e4m3")
    assert half.kv_cache_dtype == "fp8_e4m3"
    assert half.max_total_num_tokens == pytest.approx(2 * build().max_total_num_tokens, rel=1e-3)


def test_fp4_has_a_scale_for_16_values(build: Any) -> None:
    """0.5625 bytes a value, of 2: 3.56 times the tokens."""
    quarter = build(kv_cache_dtype="fp4_e2m1")
    assert quarter.kv_cache_dtype == "fp4_e2m1"
    assert quarter.max_total_num_tokens == pytest.approx(2 / 0.5625 * build().max_total_num_tokens, rel=1e-3)
    kernels = {
        op: quarter.choices[op].spec.name for op in ("decode_attention", "extend_attention", "qk_norm_rope_store")
    }
    assert set(kernels.values()) == {"triton"}


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "why"),
    [
        ("minimax_m3_nvfp4", {}, RankLayout(4), "an indexer selects by blocks"),
        ("qwen3", {"head_dim": 72}, ONE_RANK, "heads of 72 dims are no multiple of 16"),
        ("glm47", {"num_key_value_heads": 2}, RankLayout(8, dcp_size=4), "ranks share out their tokens"),
    ],
)
def test_caches_that_have_no_four_bits(name: str, changes: dict[str, Any], ranks: RankLayout, why: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    parallel = ParallelConfig("bfloat16", "fp4_e2m1", ranks=ranks)
    with pytest.raises(UserError, match=re.escape(why)) as refusal:
        cache_groups(describe_model(config, None), parallel)
    assert "--kv-cache-dtype fp8_e4m3 or bf16 works" in str(refusal.value)


def test_tensor_parallel_shares(build: Any) -> None:
    one, four = build(), build(tp_size=4)
    assert four.attention_shapes[0].num_kv_heads == 2
    assert cache_cost(four.caches).bytes_per_token * 4 == cache_cost(one.caches).bytes_per_token
    assert four.memory.weights < one.memory.weights / 3.5
    assert four.choices["all_reduce"].name == "nccl" and "all_reduce" not in one.choices
    assert build(tp_size=16).attention_shapes[0].num_kv_heads == 1, "KV heads are replicated beyond their number"


def test_stages_have_room_for_as_many_tokens(build: Any) -> None:
    one, *stages = build(), *(build(tp_size=2, pp_size=3, rank=rank) for rank in (0, 2, 5))
    assert len({(plan.pool_sizes, plan.memory, plan.stages) for plan in stages}) == 1, (
        "what the scheduler knows is alike"
    )
    layers = [[i for i, layer in enumerate(plan.description.layers) if not layer.on_other_stage] for plan in stages]
    assert [i for part in layers for i in part] == list(range(len(one.description.layers)))
    assert [plan.caches[0].num_caches for plan in stages] == list(map(len, layers))
    assert stages[0].max_total_num_tokens > 3 * one.max_total_num_tokens
    assert len({(plan.cuda_graph_bs, plan.cuda_graph_prefill_tokens) for plan in stages}) == 1
    two = build(tp_size=2)
    assert stages[0].cuda_graph_bs and stages[0].memory.graphs > two.memory.graphs
    rows = stages[0].chunked_prefill_size * two.description.hidden_size * 2
    assert stages[0].memory.activations - two.memory.activations == 6 * rows, "five on their way, one that comes"
    assert (
        stages[0].describe()["pp_size"] == len(stages[0].describe()["stages"]) == 3 and "stages" not in one.describe()
    )


def test_a_pipeline_without_tensor_shares_reserves_memory_for_its_collectives(build: Any) -> None:
    one, both = build().memory.reserve, build(tp_size=2, pp_size=2).memory.reserve
    assert build(pp_size=2).memory.reserve == build(tp_size=2).memory.reserve > one
    assert both - one == 2 * (build(pp_size=2).memory.reserve - one), "communicators of both kinds"


@pytest.mark.parametrize(("tp_size", "what"), [(33, "32 attention heads"), (64, "32 attention heads")])
def test_every_rank_has_heads(build: Any, tp_size: int, what: str) -> None:
    with pytest.raises(
        UserError, match=f"--tp-size {tp_size} is more than the model's {what}; what works: .*--tp-size 1 to"
    ):
        build(tp_size=tp_size)


def test_the_users_sizes_win(build: Any) -> None:
    plan = build(max_total_tokens=5000, max_running_requests=7, chunked_prefill_size=256, cuda_graph_max_bs=6)
    assert (plan.max_total_num_tokens, plan.max_running_requests, plan.chunked_prefill_size) == (5000, 7, 256)
    assert plan.cuda_graph_bs == (1, 2, 4, 6)
    assert build(cuda_graph_bs=[3, 1]).cuda_graph_bs == (1, 3)
    assert build(disable_cuda_graph=True).cuda_graph_bs == ()
    assert build(chunked_prefill_size=-1).chunked_prefill_size == -1


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("tokens", [5000, 4096])
def test_pages_are_whole_and_page_zero_is_extra(build: Any, page_size: int, tokens: int) -> None:
    plan = build(page_size=page_size, max_total_tokens=tokens)
    assert plan.max_total_num_tokens == tokens // page_size * page_size
    assert plan.chunked_prefill_size % page_size == 0


def test_a_request_for_too_many_tokens_is_said(build: Any) -> None:
    plan = build(max_total_tokens=50_000_000)
    assert plan.max_total_num_tokens < 50_000_000
    assert plan.warnings == (
        f"--max-total-tokens 50000000 does not fit: the KV cache holds {plan.max_total_num_tokens} tokens",
    )


def test_a_small_pool_is_said_loudly(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    plan = build(free=21 * GIB)
    assert plan.max_total_num_tokens < plan.context_len
    with caplog.at_level(logging.INFO):
        plan.log()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    for part in (f"{plan.max_total_num_tokens:,} tokens", "40,960", "--context-length", "fp8_e4m3", "--tp-size"):
        assert part in record.message
    assert "--mem-fraction-static" not in record.message, "the plan's share is the highest already"
    assert f"max_total_num_tokens={plan.max_total_num_tokens}, chunked_prefill_size=2048" in caplog.text


def test_a_tiny_pool_is_refused(build: Any) -> None:
    with pytest.raises(UserError, match="too few to serve anything"):
        build(max_total_tokens=1)


def test_weights_that_do_not_fit(build: Any) -> None:
    with pytest.raises(UserError, match=r"the weights take 15\.\d+ GiB of 15\.50 GiB .*--tp-size 2"):
        build(free=15.5 * GIB)
    with pytest.raises(UserError, match=r"--mem-fraction-static 0\.1, which must be well above 0\.162"):
        build(mem_fraction_static=0.1)


def test_cpu(build: Any) -> None:
    plan = build(TINY, "cpu", 8 * GIB)
    assert plan.device == "cpu" and plan.cuda_graph_bs == () and plan.chunked_prefill_size == 512
    assert 512 < plan.max_total_num_tokens <= 131072
    assert {choice.name for choice in plan.choices.values()} == {"torch_native"}
    assert build(TINY, "cpu", 8 * GIB, max_total_tokens=300).max_total_num_tokens == 300
    with pytest.raises(UserError, match="of main memory are free"):
        build(QWEN3_8B, "cpu", 8 * GIB)


def test_long_contexts_leave_the_request_table_small(build: Any) -> None:
    plan = build(QWEN3_8B | {"max_position_embeddings": 1_048_576})
    assert plan.max_running_requests < 1024
    assert plan.memory.tables < plan.memory.available / 30


def test_a_forced_backend_goes_through_the_same_check(build: Any) -> None:
    with pytest.raises(NoKernel, match="needs tcgen05, which sm_120 does not have"):
        build(attention_backend="trtllm_mha", strict_backends=True)
    with pytest.raises(NoKernel, match="flashinfer is not installed"):
        build(decode_attention_backend="flashinfer", strict_backends=True)
    plan = build(prefill_attention_backend="torch_native")
    assert plan.choices["extend_attention"].name == "torch_native"
    assert plan.choices["decode_attention"].name == "triton"
    assert plan.cuda_graph_bs, "prefill never runs inside a graph"


BOTH = frozenset({"triton", "flashinfer"})


@pytest.mark.parametrize(
    ("chosen", "arch", "changes", "flags"),
    [
        (True, "sm_120", {}, {}),
        (True, "gb10", {"head_dim": 256}, {"kv_cache_dtype": "fp8_e4m3"}),
        (True, "rtx-5090", {}, {"decode_attention_backend": "triton"}),
        (False, "sm_120", {}, {"packages": PACKAGES}),
        (False, "sm_120", {}, {"attention_backend": "triton"}),
        (False, "sm_120", {}, {"prefill_attention_backend": "flashinfer"}),
        (False, "sm_120", {}, {"kv_cache_dtype": "fp4_e2m1"}),
        (False, "sm_120", {"head_dim": 64}, {}),
        (True, "sm_120", {"head_dim": 256}, {}),
        (True, "h200", {}, {}),
        (False, "h200", {"head_dim": 256}, {}),
        (False, "h200", {}, {"kv_cache_dtype": "fp8_e4m3"}),
        (False, "a100-80gb", {}, {}),
    ],
)
def test_flashinfer_serves_long_prompts_where_it_is_faster(
    build: Any, chosen: bool, arch: str, changes: dict[str, Any], flags: dict[str, Any]
) -> None:
    plan = build(QWEN3_8B | changes, arch, 30 * GIB, **({"packages": BOTH} | flags))
    assert ("long_prompt_attention" in plan.choices) == chosen
    assert plan.cuda_graph_bs and (plan.cuda_graph_prefill_tokens or "prefill_attention_backend" in flags)
    if chosen:
        assert plan.choices["extend_attention"].name == "triton", "in graphs"
        assert plan.describe()["kernels"]["long_prompt_attention"]["kernel"] == "flashinfer"
        without = build(QWEN3_8B | changes, arch, 30 * GIB, **flags)
        assert plan.memory.attention - without.memory.attention > FLASHINFER_WORKSPACE


DEEPSEEK = json.loads((CONFIGS / "deepseek_v3.json").read_text()) | {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("chosen", "arch", "changes", "flags"),
    [
        (True, "sm_120", {}, {}),
        (True, "gb10", {}, {"kv_cache_dtype": "fp8_e4m3"}),
        (True, "rtx-5090", {}, {"decode_attention_backend": "triton"}),
        (True, "sm_120", {}, {"attention_backend": "flashinfer"}),
        (False, "sm_120", {}, {"packages": PACKAGES}),
        (False, "sm_120", {}, {"attention_backend": "triton"}),
        (False, "sm_120", {}, {"prefill_attention_backend": "triton"}),
        (False, "sm_120", {"qk_nope_head_dim": 64}, {}),
        (True, "h200", {}, {}),
        (False, "b200", {}, {}),
    ],
)
def test_flashinfer_serves_long_prompts_over_latents_where_it_is_faster(
    build: Any, chosen: bool, arch: str, changes: dict[str, Any], flags: dict[str, Any]
) -> None:
    def built(**named: Any) -> Plan:
        return build(DEEPSEEK | changes, arch, 30 * GIB, **({"packages": BOTH} | named))

    plan = built(**flags)
    assert ("long_latent_prompt" in plan.choices) == chosen
    assert plan.choices["latent_prompt_attention"].name == "triton" and plan.cuda_graph_bs
    if chosen:
        kernels = plan.describe()["kernels"]
        assert kernels["long_latent_prompt"]["kernel"] == "flashinfer" and "long_prompt_attention" not in kernels
    if chosen and not flags:
        more = plan.memory.attention - built(attention_backend="triton").memory.attention
        lists = 3 * (1 + FLASHINFER_LATENT_CHUNKS) * FLASHINFER_LATENT_LISTS
        assert more == FLASHINFER_LATENT_WORKSPACE + lists + FLASHINFER_PLANS


@pytest.mark.parametrize("arch", ["sm_120", "h200"])
def test_flashinfer_attends_to_latents_that_ranks_share_out(build: Any, arch: str) -> None:
    """In graphs of decoding; its prompts have none. What comes together has a page for each token."""
    flags = {"packages": BOTH, "tp_size": 2, "dcp_size": 2, "disable_two_batch_overlap": True}
    plans = {
        name: build(DEEPSEEK, arch, 60 * GIB, attention_backend=name, context_length=length, **flags)
        for name, length in (("flashinfer", 1 << 16), ("triton", 1 << 16))
    }
    ops = ("decode_attention", "extend_attention")
    plan = plans["flashinfer"]
    assert [plan.choices[op].name for op in ops] == ["flashinfer_mla"] * 2
    assert plan.cuda_graph_bs == plans["triton"].cuda_graph_bs and plan.cuda_graph_bs
    assert not plan.cuda_graph_prefill_tokens and plans["triton"].cuda_graph_prefill_tokens
    sizes = AttentionSizes((), 512, 0, 132, 8, (8,), 4, 32, windows=(0,))
    alone, listed = (attention_bytes(plan.choices, replace(sizes, gathered_tokens=count)) for count in (0, 1000))
    assert listed - alone == 1000 * LIST_BYTES_PER_PAGE
    assert plan.memory.attention > FLASHINFER_MLA_WORKSPACE + 4 * FLASHINFER_PLANS


def test_no_graphs_around_a_backend_that_cannot(build: Any) -> None:
    plan = build(decode_attention_backend="torch_native")
    assert plan.cuda_graph_bs == ()
    assert plan.warnings == ("CUDA graphs are off: torch_native cannot run inside one",)


def test_graphs_whatever_the_encoder_of_images_runs_on(build: Any) -> None:
    """It is no part of them: one whose heads no other kernel has is computed by plain torch."""
    config = json.loads((CONFIGS / "qwen35.json").read_text())
    vision = config["vision_config"] | {"hidden_size": 16 * 20, "num_heads": 16}
    plan = build(config | {"vision_config": vision})
    assert plan.choices["prefill_attention"].name == "torch_native"
    assert plan.cuda_graph_bs and plan.cuda_graph_prefill_tokens
    assert not any("graphs are off" in warning for warning in plan.warnings)


def test_describe_is_json(build: Any) -> None:
    described = json.loads(json.dumps(build().describe()))
    assert described["arch"] == "sm_120" and described["max_total_num_tokens"] > 0
    assert described["kernels"]["extend_attention"]["kernel"] == "triton"
    assert described["kernels"]["extend_attention"]["tile"]
    assert 0 < described["memory"]["mem_fraction_static"] < 1


def test_kernels_of_the_plan(build: Any) -> None:
    plan = build()
    assert plan.tile("decode_attention")["num_warps"] >= 1
    assert plan.fallbacks("extend_attention").tiles[0] == plan.tile("extend_attention")
    cpu = build(TINY, "cpu", 8 * GIB)
    assert cpu.entry(RMSNORM).__module__ == "sglang.srt.layers.native_ops"
    with pytest.raises(AssertionError, match="takes no tile"):
        cpu.tile("extend_attention")


@settings(deadline=None, max_examples=60)
@given(limit=st.integers(1, 2000), running=st.integers(1, 2000))
def test_graph_sizes(limit: int, running: int) -> None:
    args = ServerArgs.from_kwargs(model_path="x", cuda_graph_max_bs=limit)
    sizes = cuda_graph_batch_sizes(args, 512, running)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(limit, running)
    assert all(b - a <= max(8, b // 6) for a, b in itertools.pairwise(sizes))


@settings(deadline=None, max_examples=60)
@given(free=st.integers(20, 200), page=st.sampled_from([1, 16, 64]), tp=st.sampled_from([1, 2, 4]))
def test_the_plan_never_exceeds_the_memory(
    free: int, page: int, tp: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    args = ServerArgs.from_kwargs(model_path=str(directory), load_format="dummy", page_size=page, tp_size=tp)
    model = ModelConfig.from_server_args(args)
    plan = make_plan(args, model, arch_by_name("sm_120"), free * GIB, PACKAGES)
    assert spent(plan) <= plan.memory.available
    assert (plan.max_total_num_tokens + page) * cache_cost(plan.caches).bytes_per_token <= plan.memory.kv_cache
    assert plan.max_total_num_tokens % page == 0


# --- what grows while serving -----------------------------------------------------------------------------------------


def test_token_counts_of_penalties_are_planned(build: Any) -> None:
    plan = build(max_running_requests=100)
    assert plan.memory.penalties == (101 + 50) * 151936 * 4
    assert build(max_running_requests=200).max_total_num_tokens < plan.max_total_num_tokens


def test_the_rotary_table_is_planned(build: Any) -> None:
    plan = build(QWEN3_8B | {"max_position_embeddings": 1 << 18})
    assert plan.num_positions == 1 << 18 and plan.memory.rotary == (1 << 18) * 128 * 4 == 128 << 20


SMALL = QWEN3_8B | {"num_hidden_layers": 4, "num_key_value_heads": 2}
"""Whose pool has millions of tokens."""


@pytest.mark.parametrize("flags", [{}, {"mem_fraction_static": 0.5}, {"max_total_tokens": 1_000_000}, {"dcp_size": 2}])
def test_the_rotary_table_has_the_positions_that_requests_come_to(flags: dict[str, Any], build: Any) -> None:
    """Of a context much longer than the pool only as many as tokens fit, and the pool loses nothing by it."""
    flags |= {"tp_size": 2 * flags.get("dcp_size", 1)}
    plan = build(SMALL | {"max_position_embeddings": 80 << 20}, **flags)
    assert plan.context_len == 80 << 20 and plan.memory.rotary == plan.num_positions * 128 * 4
    beyond = plan.num_positions - plan.max_total_num_tokens
    assert 0 <= beyond < max(2048, plan.max_total_num_tokens // 8), (beyond, plan.max_total_num_tokens)
    assert plan.max_total_num_tokens > 1 << 18 and spent(plan) <= plan.memory.available
    assert flags.keys() != {"tp_size"} or spent(plan) > plan.memory.available - GIB // 64


@pytest.mark.parametrize(
    ("flags", "rows"),
    [({}, (1 << 18) + 1024), ({"chunked_prefill_size": 1 << 19}, (1 << 19) + 1024), ({"context_length": 4096}, 4096)],
)
def test_the_rotary_table_of_a_small_pool(flags: dict[str, Any], rows: int, build: Any) -> None:
    """It has what steps of the warm-up reach."""
    config = TINY | {"max_position_embeddings": 10 << 20}
    plan = build(config, max_total_tokens=30_000, max_running_requests=8, disable_cuda_graph=True, **flags)
    assert plan.num_positions == rows and plan.memory.rotary == rows * 16 * 4


def test_prefill_graphs_are_planned(build: Any) -> None:
    plan = build()
    prefill, decode = plan.cuda_graph_prefill_tokens, plan.cuda_graph_bs
    assert prefill and decode
    results = 2 * ((512 + 512 + 16) * 151936 * 4 + prefill[-1] * 4096 * 2)
    num_mixed = sum(decodes <= tokens for tokens in prefill for decodes in (0, 64, 256, 512))
    assert plan.memory.graphs > results + (len(decode) + num_mixed) * (6 << 20)
    without = build(disable_cuda_graph=True)
    assert without.memory.graphs == 0 and without.max_total_num_tokens > plan.max_total_num_tokens


@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfers_buffers_are_planned(build: Any, page_size: int) -> None:
    both = frozenset({"triton", "flashinfer"})
    plan = build(attention_backend="flashinfer", page_size=page_size, packages=both)
    lists = 4 * 512 * -(-40960 // page_size)
    plans = 3 * (8 << 20)
    assert plan.choices["decode_attention"].name == "flashinfer" and plan.cuda_graph_prefill_tokens == ()
    assert plan.memory.attention > (256 << 20) + plans + lists
    assert spent(plan) <= plan.memory.available


def test_flashinfers_buffers_are_planned_for_layers_with_and_without_a_window(build: Any) -> None:
    both = frozenset({"triton", "flashinfer"})
    layers = ["sliding_attention", "full_attention"] * 18
    windows = QWEN3_8B | {"use_sliding_window": True, "sliding_window": 1024, "layer_types": layers}
    alone, plan = (build(config, attention_backend="flashinfer", packages=both) for config in (QWEN3_8B, windows))
    assert [site.window for site in plan.attention_sites] == [1024, 0] and len(plan.attention_shapes) == 1
    pages = 4 * 512 * (1024 + 3) + 40 * min(plan.max_total_num_tokens, 512 * 40960)
    assert plan.memory.attention - alone.memory.attention > 2 * FLASHINFER_PLANS + pages
    assert spent(plan) <= plan.memory.available


def test_the_decode_kernels_partial_results_are_planned(build: Any) -> None:
    plan = build()
    tile, (heads, dim) = plan.tile("decode_attention"), (32, 128)
    rows = 1024 + 188 * tile["ctas_per_sm"] * tile["waves"]
    assert plan.memory.attention == rows * (heads * (dim + 1) * 4 + 24)


SRT = Path(sglang.__file__).parent / "srt"


@pytest.mark.parametrize(
    ("file", "name", "planned"),
    [
        ("layers/attention/flashinfer_backend.py", "WORKSPACE_BYTES", FLASHINFER_WORKSPACE),
        ("layers/attention/flashinfer_backend.py", "PLAN_BYTES", FLASHINFER_PLANS),
        ("layers/attention/flashinfer_mla_backend.py", "WORKSPACE_BYTES", FLASHINFER_MLA_WORKSPACE),
        ("blocks/mla/flashinfer_prompt.py", "WORKSPACE_BYTES", FLASHINFER_LATENT_WORKSPACE),
        ("blocks/mla/flashinfer_prompt.py", "LIST_BYTES", FLASHINFER_LATENT_LISTS),
        ("blocks/mla/flashinfer_prompt.py", "MAX_CHUNKS", FLASHINFER_LATENT_CHUNKS),
        ("layers/attention/sparse.py", "LOGIT_BYTES", INDEX_LOGIT_BYTES),
        ("layers/attention/entry_shares.py", "MAX_ROUNDS", SPARSE_ROUNDS),
        ("model_executor/graph_runner.py", "MAX_PROMPTS", PREFILL_GRAPH_PROMPTS),
    ],
)
def test_planned_sizes_are_the_codes(file: str, name: str, planned: int) -> None:
    """Read, not imported: FlashInfer need not be installed."""
    tree = ast.parse((SRT / file).read_text())
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    assert eval(compile(ast.Expression(assigned[0].value), file, "eval")) == planned


def test_main_memory_holds_the_tables_too(build: Any) -> None:
    with pytest.raises(UserError, match="tables of 100,000,000 positions for 64 requests .*a smaller --context-length"):
        build(TINY | {"max_position_embeddings": 100_000_000}, "cpu", 8 * GIB)


def test_advice_names_a_layout_that_works(build: Any) -> None:
    in_fp8 = r"--quantization fp8, which makes FP8 weights of 16 bits at the start"
    with pytest.raises(UserError, match=rf"What helps: more GPUs \(--tp-size 2\), or {in_fp8}, or a quantized"):
        build(free=15.5 * GIB)
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 128}
    five = {"config": QWEN3_8B | heads | {"intermediate_size": 12288 * 5}, "free": 11 * GIB, "tp_size": 5}
    with pytest.raises(UserError, match=rf"reserve\. What helps: {in_fp8}, or a quantized checkpoint\.$"):
        build(**five)
    assert build(**five, quantization="fp8").max_total_num_tokens >= 4096


@pytest.mark.parametrize("name", ["deepseek_v3", "glm47", "qwen35"])
@pytest.mark.parametrize(("arch", "free"), [("rtx-pro-6000", 92), ("rtx-5090", 30)])
def test_as_many_gpus_as_advised_are_enough(build: Any, name: str, arch: str, free: int) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    try:
        build(config, arch, free * GIB)
    except UserError as refusal:
        found = re.search(r"more GPUs \((.*?)\)", str(refusal))
        advice = found[1].removeprefix("--").split(" --") if found else []
        flags = {key.replace("-", "_"): int(value) for key, value in map(str.split, advice)}
        if flags:
            assert build(config, arch, free * GIB, **flags).max_total_num_tokens > 4096, str(refusal)
        assert flags or "no layout of up to 16 such GPUs" in str(refusal)


GLM47 = json.loads((CONFIGS / "glm47.json").read_text())


def test_a_model_that_just_fits_gets_smaller_sizes_and_a_cache(build: Any) -> None:
    """GLM-4.7-FP8 on four cards: with the sizes that their memory stands for nothing would be left."""
    roomy, plan = (build(GLM47, "rtx-pro-6000-server", 92.72 * GIB, tp_size=tp) for tp in (8, 4))
    assert (roomy.chunked_prefill_size, roomy.max_running_requests, roomy.warnings) == (8192, 1024, ())
    assert plan.max_total_num_tokens > 55_000 and spent(plan) <= plan.memory.available
    assert (plan.chunked_prefill_size, plan.max_running_requests, plan.cuda_graph_bs[-1]) == (2048, 64, 64)
    assert "the weights leave 9.7" in plan.warnings[0] and "--chunked-prefill-size 2048" in plan.warnings[0]
    large = {"chunked_prefill_size": 8192, "max_running_requests": 1024, "cuda_graph_max_bs": 512}
    with pytest.raises(
        UserError, match="--chunked-prefill-size 2048 --max-running-requests 64 --cuda-graph-max-bs 64, or"
    ):
        build(GLM47, "rtx-pro-6000-server", 92.72 * GIB, tp_size=4, **large)


def test_sizes_that_the_user_gave_stay(build: Any) -> None:
    given = {"chunked_prefill_size": 4096, "max_running_requests": 24, "cuda_graph_max_bs": 16}
    plan = build(GLM47, "rtx-pro-6000-server", 92.72 * GIB, tp_size=4, **given)
    assert (plan.chunked_prefill_size, plan.max_running_requests, plan.cuda_graph_bs[-1]) == (4096, 24, 16)
    share = build(GLM47, "rtx-pro-6000-server", 92.72 * GIB, tp_size=4, mem_fraction_static=0.97)
    assert share.chunked_prefill_size == 8192, "the share says what the caches get, whatever the rest needs"
    few = build(free=31 * GIB, max_total_tokens=1000)
    assert few.chunked_prefill_size == 2048 and few.max_running_requests == 256 and few.warnings == ()


def test_what_a_checkpoint_keeps_in_16_bits_is_said(build: Any) -> None:
    with pytest.raises(UserError, match=r"the checkpoint keeps [\d.]+ GiB of attn in 16 bits\. .* quantizes these too"):
        build(
            GLM47 | {"quantization_config": _without_attention(GLM47["quantization_config"])}, free=30 * GIB, tp_size=8
        )


def _without_attention(quantization: dict[str, Any]) -> dict[str, Any]:
    return quantization | {"ignore": [*quantization["ignore"], "re:.*self_attn.*"]}


def test_kv_spec() -> None:
    assert kv_cache_dtype("auto", "float16") == "float16" and kv_cache_dtype("bf16", "float16") == "bfloat16"
    with pytest.raises(UserError, match="--kv-cache-dtype int3"):
        kv_cache_dtype("int3", "bfloat16")


def test_a_description_names_a_missing_key() -> None:
    with pytest.raises(UserError, match="the key 'hidden_size' is missing"):
        describe_model({"num_attention_heads": 4}, None)


def test_a_missing_key_of_an_unknown_model_is_told_with_its_type() -> None:
    """Its layers may have other keys."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    config = sizes | {"num_hidden_layers": 1, "num_attention_heads": 4, "layer_types": ["linear_attention"]}
    with pytest.raises(UserError, match=r"'linear_num_key_heads' is missing\. No family here has .* 'lightning'"):
        describe_model(config | {"model_type": "lightning"}, None)
    with pytest.raises(UserError, match="'linear_num_key_heads' is missing.$"):
        describe_model(config | {"model_type": "qwen3_next"}, None)


FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_linear_layers_have_a_choice_for_each_scheme(build: Any) -> None:
    plan = build(QWEN3_8B | {"quantization_config": FP8_BLOCK})
    assert plan.choices["linear"].name == "triton_gemv", "the output head is in 16 bits"
    assert plan.choices["linear/fp8_block"].name == "triton_quantized"
    assert plan.choices["linear/fp8_block"].remark == ""
    assert plan.entry(QUANTIZED_LINEAR, "linear/fp8_block").__name__ == "quantized_linear"
    cpu = build(TINY | {"quantization_config": FP8_BLOCK}, "cpu", 8 * GIB)
    assert cpu.choices["linear/fp8_block"].name == "torch_dequantized"
    described = cpu.describe()
    assert "dequantized" in described["kernels"]["linear/fp8_block"]["remark"]
    assert described["quantization"].startswith("fp8 (fp8_block) according to ")


def test_large_fp8_products_are_the_librarys_where_a_look_at_the_gpu_says_so(build: Any) -> None:
    config = QWEN3_8B | {"quantization_config": FP8_BLOCK}
    choice = build(config, "h200", 140 * GIB, probe=lambda need: "").choices["linear/fp8_block"]
    assert choice.name == "torch_scaled_mm" and "of 1,024 tokens and more" in choice.remark

    fallen = build(config, "h200", 140 * GIB, probe=lambda need: f"no {need.quant} today").choices["linear/fp8_block"]
    assert fallen.name == "triton_quantized"
    assert "torch_scaled_mm: no fp8_block today" in map(str, fallen.rejected)

    asked = build(config, "h200", 140 * GIB, fp8_gemm_backend="triton")
    assert asked.choices["linear/fp8_block"].name == "triton_quantized", "the flag comes first"
    assert asked.choices["linear"].name == "triton_gemv", "and is about FP8 weights only"
    assert build(QWEN3_8B, fp8_gemm_backend="triton").choices["linear"].name == "triton_gemv"
    with pytest.raises(UserError, match="needs wgmma, which sm_120 does not have"):
        build(config, fp8_gemm_backend="torch_scaled_mm", strict_backends=True)
    with pytest.raises(UserError, match="no fp8_block today"):
        asked = {"fp8_gemm_backend": "torch_scaled_mm", "probe": lambda need: "no fp8_block today"}
        build(config, "h200", 140 * GIB, **asked, strict_backends=True)
    assert (
        "torch_scaled_mm cannot serve this model here (no fp8_block today)"
        in build(config, "h200", **asked).warnings[0]
    )


def test_quantized_weights_take_less_memory(build: Any) -> None:
    half = build(QWEN3_8B | {"quantization_config": FP8_BLOCK}).memory.weights
    assert 0.5 < half / build().memory.weights < 0.6, "embedding and output head stay in 16 bits"


def test_gpus_without_e4m3_say_so(build: Any) -> None:
    choice = build(QWEN3_8B | {"quantization_config": FP8_BLOCK}, "sm_80").choices["linear/fp8_block"]
    assert choice.name == "torch_dequantized" and "weights dequantized" in choice.remark
    assert "no e4m3 arithmetic on sm_80, which fp8_block needs" in str(choice.rejected[4])


def test_a_calibrated_cache_is_the_default(build: Any) -> None:
    for algorithm, dtype in (("FP8", "fp8_e4m3"), ("NVFP4", "fp4_e2m1"), ("nvfp4", "fp4_e2m1")):
        quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": algorithm}
        config = QWEN3_8B | {"quantization_config": quantization}
        assert build(config).kv_cache_dtype == dtype
        assert build(config, kv_cache_dtype="bf16").kv_cache_dtype == "bfloat16"
