"""Sizes of the prefix cache in main memory, and the flags that decide them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang import explain
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan import host_cache
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor, Window, key_value_cache
from sglang.srt.plan.caches import group_caches
from sglang.srt.plan.host_cache import (
    COPIED,
    GB,
    GIB,
    PACED_RATE,
    HostCachePlan,
    RankBytes,
    copy_bytes,
    keeps_unasked,
    plan_host_cache,
)
from sglang.srt.plan.plan import make_plan
from sglang.srt.plan.pool_sizes import PoolSizes, WindowSize
from sglang.srt.server_args import ServerArgs
from srt.models.harness import save_tiny

FULL = key_value_cache("kv", 8, 128, 128, "bfloat16")
WINDOW = key_value_cache("kv", 8, 128, 128, "bfloat16", Window(128))
STATE = CacheSpec("state", (CacheTensor("state", (1 << 20,), "float32"),), lifetime=PER_REQUEST)
GROUPS = group_caches([(FULL,)] * 10 + [(WINDOW,)] * 10 + [(STATE,)])
TOKEN = 10 * 2 * 8 * 128 * 2
DEVICE = PoolSizes(1_000_000, 64, 32, 131072, (WindowSize(128, 64_000),), True, 40)
AT_ONE = TOKEN * 1_000_000 + TOKEN * 64_000 + (4 << 20) * 40


def args(**options: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(**{"model_path": "m", "enable_hierarchical_cache": True, **options})


def plan(available: int | None, processes: int = 1, arch: str = "sm_120", **options: Any) -> HostCachePlan:
    made, notes = plan_host_cache(args(**options), GROUPS, DEVICE, arch_by_name(arch), available, processes)
    assert made is not None and not notes
    return made


def test_twice_the_gpu_where_that_fits() -> None:
    made = plan(400 * GIB)
    assert made.sizes.tokens == 2_000_000 // 64 * 64 and made.sizes.windows == (WindowSize(128, 128_000),)
    assert made.sizes.checkpoints == 80 and made.sizes.max_requests == 0
    assert made.token_bytes == made.sizes.tokens * TOKEN and made.state_bytes == 80 * (4 << 20)
    assert made.window_bytes == 128_000 * TOKEN
    assert made.describe()["bytes"] == made.total_bytes and made.write_policy == "write_through_selective"


def test_what_fits_where_twice_does_not() -> None:
    made = plan(110 * GIB, processes=4)
    assert 0.78 * 25 * GIB < made.total_bytes <= 0.8 * 25 * GIB
    assert plan(110 * GIB, processes=4, hicache_host_memory_fraction=0.4).total_bytes < 0.55 * made.total_bytes


def test_a_size_is_of_each_rank() -> None:
    made = plan(400 * GIB, processes=4, hicache_size=40)
    assert 39.5 * GB < made.total_bytes <= 40 * GB
    assert made.describe()["bytes_of_machine"] == 4 * made.total_bytes
    assert plan(400 * GIB, hicache_ratio=1.5).total_bytes == pytest.approx(1.5 * AT_ONE, rel=0.01)
    assert plan(None).total_bytes == pytest.approx(2 * AT_ONE, rel=0.01), "nobody knows the machine"


def test_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="40.* GiB are free. Use a smaller --hicache-size"):
        plan(40 * GIB, hicache_size=50)
    with pytest.raises(UserError, match="of 4 pools"):
        plan(100 * GIB, processes=4, hicache_ratio=1.0)


@pytest.mark.parametrize(
    ("device", "arch", "available", "reason"),
    [
        (DEVICE, "gb10", None, "is the machine's"),
        (replace(DEVICE, checkpoints=0), "sm_120", None, "no memory is left for copies of states"),
        (DEVICE, "sm_120", GIB, "too little main memory is free"),
    ],
)
def test_no_effect(device: PoolSizes, arch: str, available: int | None, reason: str) -> None:
    made, notes = plan_host_cache(args(), GROUPS, device, arch_by_name(arch), available, 1)
    assert made is None and len(notes) == 1 and reason in notes[0]


def test_the_memory_of_a_store_comes_first() -> None:
    """What Mooncake's library takes in each rank is not given to the pools."""
    extra = '{"master_server_address": "m:1", "global_segment_size": "40Gi", "local_buffer_size": "10Gi"}'
    store = {"hicache_storage_backend": "mooncake", "hicache_storage_backend_extra_config": extra}
    without, made = (plan(200 * GIB, processes=2, **options) for options in ({}, store))
    assert made.storage is not None and made.storage.rank_bytes == 50 * GIB
    assert without.total_bytes - made.total_bytes == pytest.approx(0.8 * 50 * GIB, rel=0.01)
    assert "which takes 50.00 GiB a rank besides" in str(made)
    with pytest.raises(UserError, match="smaller global_segment_size"):
        plan(90 * GIB, processes=2, **store)


def test_copies_are_planned_on_the_device() -> None:
    assert copy_bytes(args(), arch_by_name("sm_120")) == 64 << 20
    assert not copy_bytes(args(), arch_by_name("gb10"))
    assert not copy_bytes(replace(args(), enable_hierarchical_cache=False), arch_by_name("sm_120"))


def test_a_copy_to_main_memory_is_bounded() -> None:
    made = plan(400 * GIB)
    assert made.save_tokens % 64 == 0 and (256 << 20) - 64 * TOKEN < made.save_tokens * TOKEN <= 256 << 20


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache leaves none"),
        ({"hicache_ratio": 0.0}, "--hicache-ratio must be above 0"),
        ({"hicache_host_memory_fraction": 0.0}, "must be above 0"),
        ({"hicache_storage_backend": "hf3fs"}, "use file, nixl, mooncake or lmcache, or dynamic"),
        ({"hicache_storage_backend": "mooncake"}, "MOONCAKE_MASTER"),
        ({"hicache_storage_backend": "lmcache"}, "lm://HOST:PORT"),
        ({"hicache_storage_backend": "file", "enable_hierarchical_cache": False}, "needs --enable-hierarchical-cache"),
        ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": "{"}, "cannot be parsed"),
        ({"hicache_storage_backend_extra_config": "{}"}, "add --hicache-storage-backend"),
        ({"hicache_host_memory_mode": "buffer_only"}, "in files or another store"),
    ],
)
def test_what_has_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        args(**options)


def test_spellings_of_upstream() -> None:
    command = [
        "--model",
        "m",
        "--enable-hicache",
        "--hicache-io-backend",
        "kernel",
        "--hicache-mem-layout",
        "page_first",
    ]
    assert ServerArgs.from_cli([*command, "--hicache-host-memory-mode", "cache"]).enable_hierarchical_cache


def test_a_store_is_planned() -> None:
    made = plan(400 * GIB, hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete")
    assert made.storage is not None and made.storage.prefetch_threshold == 256 and not made.ranks_share
    assert made.describe()["storage"]["backend"] == "file" and "the backend file" in str(made)
    assert plan(400 * GIB).storage is None


@pytest.mark.parametrize(
    ("name", "dcp_size", "share"),
    [("deepseek_v3", 1, True), ("deepseek_v3", 2, False), ("deepseek_v32", 1, True), ("qwen3", 1, False)],
)
def test_ranks_share_latents(name: str, dcp_size: int, share: bool, tmp_path: Path) -> None:
    """Where they share out the tokens, each has pages of its own, of half as many bytes."""
    save_tiny(name, tmp_path)
    options: dict[str, Any] = {"device": "cpu", "tp_size": 2, "dcp_size": dcp_size}
    options |= {"max_total_tokens": 256, "enable_hierarchical_cache": True, "hicache_ratio": 2.0}
    server = ServerArgs.from_kwargs(model_path=str(tmp_path), **options)
    made = make_plan(server, ModelConfig.from_server_args(server), arch_by_name("cpu"), 8 * GIB, rank=1)
    assert made.host_cache is not None and made.host_cache.ranks_share is share
    assert made.host_cache.sharers == (2 if share else 1) and made.host_cache.processes == (1 if share else 2)
    token_bytes = sum(group.bytes_per_token for group in made.caches)
    assert made.host_cache.token_bytes == token_bytes * made.host_cache.sizes.tokens
    assert all(group.dcp_size == dcp_size for group in made.caches)


def test_prefixes_are_kept_unasked_on_gpus_with_free_main_memory() -> None:
    def unasked(arch: str = "sm_120", free: int = 100 * GIB, **options: Any) -> bool:
        return keeps_unasked(ServerArgs.from_kwargs(model_path="m", **options), arch_by_name(arch), free)

    assert unasked() and unasked("h200") and unasked(tp_size=4)
    assert not unasked("gb10") and not unasked("cpu") and not unasked(free=31 * GIB)
    assert not unasked(disable_hierarchical_cache=True) and not unasked(disable_radix_cache=True)
    assert unasked(tp_size=2, dcp_size=2) and not unasked(tp_size=2, attn_dp_size=2)
    with pytest.raises(UserError, match="remove one of them"):
        args(disable_hierarchical_cache=True)


def test_what_nobody_asked_for_takes_less_and_must_pay() -> None:
    def made(weights: RankBytes, available: int = 110 * GIB, device: PoolSizes = DEVICE) -> HostCachePlan | None:
        server, arch = args(), arch_by_name("sm_120")
        plan, notes = plan_host_cache(server, GROUPS, device, arch, available, 1, weights=weights, unasked=True)
        assert not notes
        return plan

    dense = made(RankBytes(16 * GIB, 16 * GIB))
    assert dense is not None and 0.49 * 100 * GIB < dense.total_bytes <= 0.5 * 100 * GIB
    large = made(RankBytes(16 * GIB, 16 * GIB), 2000 * GIB)
    assert large is not None and large.total_bytes == pytest.approx(4 * AT_ONE, rel=0.01)
    assert made(RankBytes(GIB // 2, GIB // 2)) is None, "it is computed about as fast"
    assert made(RankBytes(16 * GIB, GIB // 2)) is None, "a mixture of which a token multiplies little"
    assert made(RankBytes(16 * GIB, 16 * GIB), GIB) is None
    assert made(RankBytes(16 * GIB, 16 * GIB), device=replace(DEVICE, checkpoints=0)) is None


def test_copies_of_ranks_that_add_up_over_the_bus_are_paced() -> None:
    def rate(arch: str, **options: Any) -> float | None:
        weights = RankBytes(GIB, GIB)
        made, _ = plan_host_cache(args(**options), GROUPS, DEVICE, arch_by_name(arch), None, 2, weights=weights)
        assert made is not None
        return made.paced_rate

    assert rate("sm_120", tp_size=2) == PACED_RATE
    assert rate("sm_120") is None and rate("h200", tp_size=2) is None


def test_ranks_that_share_a_pool_give_as_much_each() -> None:
    def made(sharers: int, available: int | None = 400 * GIB, **options: Any) -> HostCachePlan:
        pools = 4 // sharers
        arch = arch_by_name("sm_120")
        plan, _ = plan_host_cache(args(**options), GROUPS, DEVICE, arch, available, pools, True, sharers=sharers)
        assert plan is not None
        return plan

    alone, together = made(1, hicache_size=40), made(4, hicache_size=40)
    assert together.total_bytes * together.processes == pytest.approx(4 * alone.total_bytes, rel=0.01)
    assert together.sizes.tokens == pytest.approx(4 * alone.sizes.tokens, rel=0.01)
    assert "that 4 ranks share" in str(together)
    assert made(4, hicache_ratio=0.7).sizes.tokens == made(1, hicache_ratio=0.7).sizes.tokens, (
        "a ratio is one of tokens"
    )
    assert made(4, 100 * GIB).total_bytes <= 0.8 * 90 * GIB


@pytest.mark.parametrize("policy", list(COPIED))
def test_every_policy_is_a_choice_of_the_flag(policy: str) -> None:
    made = plan(400 * GIB, hicache_write_policy=policy)
    assert made.describe()["write_policy"] == policy and COPIED[policy] in str(made)


def explained(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    words = ["--arch", "rtx-pro-6000-server", "--model-path", str(folder), "--json", *flags]
    assert explain.main(words) == 0
    memory: dict[str, Any] = json.loads(capsys.readouterr().out).get("main_memory", {})
    return memory


def test_explain_counts_main_memory_of_each_numa_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("deepseek_v3", tmp_path)
    asked = ("--enable-hierarchical-cache", "--tp", "2")
    memory = explained(tmp_path, capsys, *asked, "--hicache-size", "40", "--numa-nodes", "2")
    assert 39.5 * GB < memory["bytes_of_gpu"] <= 40 * GB and not memory["at_most"]
    assert memory["bytes_of_machine"] == pytest.approx(2 * memory["bytes_of_gpu"], abs=2)
    assert memory["bytes_of_numa_node"] == -(-memory["bytes_of_machine"] // 2)
    assert memory["ranks_of_a_pool"] == 2, "latents are stored once a machine"
    assert explained(tmp_path, capsys, *asked, "--host-memory", "64")["bytes_of_machine"] < 0.8 * 54 * GIB
    timed = [
        explained(tmp_path, capsys, *asked, "--time", "--time-context", str(tokens))["loading_seconds"]
        for tokens in (64, 128)
    ]
    assert timed[1] == pytest.approx(2 * timed[0]) and timed[0] > 0
    assert explain.main(["--model-path", str(tmp_path), *asked, "--arch", "sm_120", "--host-memory", "30"]) == 0
    assert "for each GPU at its NUMA node" in capsys.readouterr().out
    refused = ("--arch", "rtx-pro-6000-server", "--model-path", str(tmp_path), *asked, "--hicache-size", "40")
    assert explain.main([*refused, "--host-memory", "30"]) == explain.WOULD_NOT_START
    assert "Use a smaller --hicache-size" in capsys.readouterr().out
    assert explain.main(["--model-path", str(tmp_path), "--numa-nodes", "0"]) == 2


def test_explain_says_what_main_memory_is_taken_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most four times the cache of the GPU, where nothing is known of the machine; nothing where it does not pay or
    less than 32 GiB are free."""
    save_tiny("qwen3", tmp_path)
    assert not explained(tmp_path, capsys), "computing so small a model takes no time"
    monkeypatch.setattr(host_cache, "_pays", lambda *_: True)
    most = explained(tmp_path, capsys)
    asked = explained(tmp_path, capsys, "--enable-hierarchical-cache", "--hicache-ratio", "1")
    assert most["at_most"] and most["bytes_of_gpu"] == pytest.approx(4 * asked["bytes_of_gpu"], rel=0.01)
    assert 0 < explained(tmp_path, capsys, "--host-memory", "64")["bytes_of_machine"] <= 27 * GIB
    assert not explained(tmp_path, capsys, "--host-memory", "31")
    assert not explained(tmp_path, capsys, "--disable-hierarchical-cache")
