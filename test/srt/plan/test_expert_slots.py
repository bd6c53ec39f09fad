"""Experts in main memory, as they are planned: when, how many slots, what is refused, and what is predicted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.speculative import AdaptiveSettings
from sglang.srt.drafts.depth import AdaptiveDepth, with_expert_copies
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name, lockable_bytes
from sglang.srt.managers.scheduler import scheduler_setup
from sglang.srt.managers.scheduler.replicas import ONE_REPLICA
from sglang.srt.plan.cpu_experts import SPARE_CORES
from sglang.srt.plan.expert_slot_plan import CHANNEL_RATE, ExpertSlotPlan, MainMemory, bus_rate, hit_share
from sglang.srt.plan.expert_slots import RESERVED_TOKENS
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.server_args import ServerArgs
from srt.kernels import published

GIB = 1024**3
MODEL = "Qwen3-235B-A22B-NVFP4"
"""94 layers of 128 experts, 119 GiB in all; 8 of a token."""


@functools.cache
def folder(name: str) -> str:
    return str(Path(published.config_files()[name]).parent)


def plan(
    name: str = MODEL,
    gpu: str = "rtx-5090",
    main: int | None = 256,
    free: float = 0,
    channels: float = 0,
    cores: int = 0,
    **flags: Any,
) -> Plan:
    args = ServerArgs(model_path=folder(name), **flags)
    arch = arch_by_name(gpu)
    bytes_free = int(free * GIB) or int(0.97 * arch.memory)
    host = None if main is None else main * GIB
    return make_plan(
        args, ModelConfig.from_server_args(args), arch, bytes_free, frozenset({"triton"}), host_bytes=host,
        advises=False, main_memory=MainMemory(host, channels * CHANNEL_RATE, cores),
    )  # fmt: skip


def refusal(**asked: Any) -> str:
    with pytest.raises(UserError) as refused:
        plan(**asked)
    return str(refused.value)


def test_experts_go_to_main_memory_where_the_weights_do_not_fit() -> None:
    made = plan()
    slots = made.expert_slots
    assert slots is not None and slots.layers == 94 and slots.experts == 128
    assert 118 < slots.host_bytes / GIB < 121
    assert 8 < slots.slots < 32, "a few GiB of 119"
    assert made.max_total_num_tokens >= RESERVED_TOKENS
    assert made.memory.available >= sum(
        v for k, v in made.memory.describe().items() if k not in ("available", "mem_fraction_static")
    )
    assert made.chunked_prefill_size == 8192, "the bytes of a prompt are those of its chunks"
    assert made.cuda_graph_bs and not made.cuda_graph_prefill_tokens
    assert made.choices["expert_slots"].name == "triton"
    assert "experts of 94 layers in main memory: 11" in str(slots) and "predicted" in str(slots)


def test_more_memory_gives_more_slots_and_faster_steps() -> None:
    small, large = plan().expert_slots, plan(gpu="rtx-pro-6000").expert_slots
    assert small is not None and large is not None
    assert large.slots > 3 * small.slots and large.decode_one < small.decode_one / 1.5


def test_what_fits_stays_in_gpu_memory() -> None:
    resident = plan("Qwen3-30B-A3B", "rtx-pro-6000")
    assert resident.expert_slots is None and "expert_slots" not in resident.describe()


@pytest.mark.parametrize("main", [None, 96])
def test_without_enough_main_memory_the_refusal_is_that_of_the_gpu(main: int | None) -> None:
    assert "the weights take" in refusal(main=main)


def test_a_flag_asks_where_main_memory_is_unknown_or_says_what_is_missing() -> None:
    assert plan(main=None, enable_paged_experts=True).expert_slots is not None
    assert "of main memory, and" in refusal(main=96, enable_paged_experts=True)


def test_numbers_of_slots() -> None:
    asked = plan(enable_paged_experts=True, paged_experts_num_resident=9).expert_slots
    assert asked is not None and asked.slots == 9
    most = refusal(enable_paged_experts=True, paged_experts_num_resident=100)
    largest = int(most.split()[-1])
    assert plan(paged_experts_num_resident=largest).expert_slots is not None
    assert "do not fit" in refusal(paged_experts_num_resident=largest + 1)
    assert "needs 8 experts at once" in refusal(paged_experts_num_resident=7)
    assert "all of them would be in GPU memory" in refusal(paged_experts_num_resident=128)


def test_what_has_no_experts_or_main_memory_of_its_own_is_refused_by_name() -> None:
    assert "Qwen3ForCausalLM has no experts" in refusal(name="Qwen3-8B", enable_paged_experts=True)
    for gpu in ("gb10", "sm_121"):
        assert "gb10 is main memory" in refusal(name="Qwen3-30B-A3B", gpu=gpu, enable_paged_experts=True)


def test_a_rank_has_its_share_and_the_machine_all() -> None:
    whole, half = plan().expert_slots, plan(tp_size=2).expert_slots
    experts = plan(tp_size=2, ep_size=2).expert_slots
    assert whole is not None and half is not None and experts is not None
    for shared in (half, experts):
        assert shared.processes == 2
        assert abs(2 * shared.host_bytes / whole.host_bytes - 1) < 0.02
    assert experts.experts == 64 and half.experts == 128
    assert half.slots > 2 * whole.slots


def test_replicas_share_a_bank() -> None:
    """A machine with room for one and a half banks holds two replicas, whose prefixes get what one bank leaves."""
    two = plan(main=180, dp_size=2).expert_slots
    assert two is not None and (two.processes, two.banks) == (2, 1)
    assert f"{two.host_bytes / GIB:.2f} GiB, which 2 replicas share, " in str(two)
    four = plan(main=180, dp_size=2, tp_size=2).expert_slots
    assert four is not None and (four.processes, four.banks) == (4, 2)
    assert "GiB for each of 2 ranks, which 2 replicas share, " in str(four)
    assert "of main memory, and" in refusal(main=180, dp_size=2, use_ray=True, enable_paged_experts=True)
    tier = {"enable_hierarchical_cache": True, "hicache_ratio": 1.0}
    assert plan(main=180, dp_size=2, **tier).host_cache is not None


def test_prefixes_get_what_experts_leave_of_main_memory() -> None:
    args = {"enable_hierarchical_cache": True, "hicache_ratio": 64.0}
    assert "are free" in refusal(main=140, **args)
    assert plan(main=1400, **args).host_cache is not None


def test_experts_go_before_prefixes_on_the_bus() -> None:
    """While requests decode, copies of prefixes take an eighth of it."""
    tier = {"enable_hierarchical_cache": True, "hicache_ratio": 1.0, "main": 1400}
    made, resident = plan(**tier), plan("Qwen3-8B", "rtx-pro-6000", **tier)
    assert made.host_cache is not None and made.expert_slots is not None and resident.host_cache is not None
    assert made.host_cache.paced_rate == made.expert_slots.rate / 8
    assert resident.host_cache.paced_rate is None
    two = plan(tp_size=2, **tier)
    assert two.host_cache is not None and two.expert_slots is not None
    assert two.host_cache.paced_rate == min(16e9, two.expert_slots.rate / 8)


def test_buffers_hold_all_other_experts_where_that_takes_little() -> None:
    small, large = plan("GLM-5.3-Flash-NVFP4").expert_slots, plan("GLM-5.3-Flash-NVFP4", "rtx-pro-6000").expert_slots
    assert small is not None and large is not None
    assert small.slots + small.buffered < small.experts == large.slots + large.buffered
    assert small.slots + small.buffered > 8 * 8, "eight requests need no waves"


@pytest.mark.parametrize(("name", "free"), [(MODEL, 16), ("MiniMax-M2.7-NVFP4", 14), ("Qwen3-30B-A3B", 8)])
def test_slots_leave_chunks_as_long_as_they_are_with_the_fewest(name: str, free: float) -> None:
    """A prompt costs all bytes once a chunk, and a slot saves few of them."""
    made = plan(name, free=free)
    fewest = plan(name, free=free, enable_paged_experts=True, paged_experts_num_resident=8)
    assert made.chunked_prefill_size == fewest.chunked_prefill_size
    assert made.expert_slots is not None and made.expert_slots.chunk == made.chunked_prefill_size


def test_buffers_shrink_where_chunks_then_grow() -> None:
    made = plan("MiniMax-M2.7-NVFP4", free=15)
    slots, asked = made.expert_slots, plan("MiniMax-M2.7-NVFP4", free=15, chunked_prefill_size=2048).expert_slots
    assert slots is not None and asked is not None
    assert slots.chunk > 2048 and slots.buffered < asked.buffered


def test_predictions() -> None:
    assert hit_share(0) == 0 and hit_share(1) == 1
    assert hit_share(0.36) == pytest.approx(0.62) and hit_share(0.455) == pytest.approx(0.67)
    arch = arch_by_name("rtx-5090")
    assert bus_rate(arch, MainMemory(), 1) == 55e9
    assert bus_rate(arch, MainMemory(rate=2 * CHANNEL_RATE), 2) == 38e9
    assert bus_rate(arch_by_name("rtx-3090"), MainMemory(), 1) == 25e9


def test_a_step_copies_its_distinct_experts_that_are_in_no_slot() -> None:
    slots = plan(gpu="rtx-pro-6000", paged_experts_num_resident=64).expert_slots
    assert slots is not None
    whole, of_expert = slots.host_bytes, slots.host_bytes / 128
    assert slots.used_bytes(1) == pytest.approx(8 * of_expert)
    assert slots.used_bytes(8) == pytest.approx((1 - (15 / 16) ** 8) * whole)
    assert slots.copied_bytes(1) == pytest.approx(8 * of_expert * (1 - hit_share(0.5)))
    assert slots.copied_bytes(8192) == pytest.approx(whole / 2), "slots hold the other half"
    assert slots.copy_seconds(8192) == pytest.approx(slots.prompt)


def test_drafts_count_the_experts_that_they_copy() -> None:
    """A step that copies nothing while it is timed takes three draft tokens; one that copies takes none, or one."""
    slots = plan().expert_slots
    times = {(requests, width): 20.0 + width for requests in (1, 4) for width in (1, 2, 3, 4)}
    settings = AdaptiveSettings()
    resident = AdaptiveDepth(settings, 4, with_expert_copies(times, None))
    streamed = AdaptiveDepth(settings, 4, with_expert_copies(times, slots))
    assert resident.next_width(1) > 2 >= streamed.next_width(1)


def test_windows_locks_half_of_its_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       100 kB\n")
    (tmp_path / "proc/version").write_text("Linux version 6.6 (Ubuntu)")
    assert lockable_bytes(80 * 1024, tmp_path) == 80 * 1024
    (tmp_path / "proc/version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert lockable_bytes(80 * 1024, tmp_path) == 50 * 1024
    assert lockable_bytes(30 * 1024, tmp_path) == 30 * 1024


def slots_of(**asked: Any) -> ExpertSlotPlan:
    found = plan(**asked).expert_slots
    assert found is not None
    return found


def test_cpus_compute_experts_by_default_where_memory_has_the_bandwidth() -> None:
    for channels in (0, 2, 4):
        assert slots_of(channels=channels).cpu_threads == 0, "unknown, and not clearly more than the bus takes"
    eight, without = slots_of(channels=8), slots_of(channels=8, kt_cpuinfer=0)
    assert without.cpu_threads == 0 and 30 < eight.cpu_threads < 60, "a flag pins it"
    assert without.decode_one / eight.decode_one > 1.5 and without.decode_eight / eight.decode_eight > 1.5
    assert (eight.slots, eight.prompt) == (without.slots, without.prompt)
    assert f"predicted with {eight.cpu_threads} threads of CPUs " in str(eight)
    assert slots_of(channels=8, kt_cpuinfer=eight.cpu_threads) == eight
    assert slots_of(channels=8, kt_cpuinfer=16, tp_size=2).cpu_threads == 8
    assert ExpertSlotPlan.from_json(eight.describe()) == eight
    assert plan(channels=8).choices["cpu_experts"].name == "triton"
    assert "cpu_experts" not in plan().choices


def test_cores_limit_threads_and_ranks_share_them() -> None:
    assert slots_of(channels=8, cores=16).cpu_threads == 16 - SPARE_CORES
    assert slots_of(channels=8, cores=2).cpu_threads == 0
    assert slots_of(channels=12, cores=400).cpu_threads == slots_of(channels=12).cpu_threads
    assert slots_of(channels=24, cores=48, tp_size=2).cpu_threads == 24 - SPARE_CORES


def test_cpus_rest_where_slots_hold_nearly_everything() -> None:
    """Asking costs each layer more than hardly any copies."""
    few = {"name": "Qwen3-30B-A3B", "gpu": "rtx-pro-6000", "channels": 8}
    assert slots_of(**few, paged_experts_num_resident=20).cpu_threads > 0
    assert slots_of(**few, paged_experts_num_resident=127).cpu_threads == 0


@pytest.mark.parametrize(
    ("found", "asked", "threads"),
    [((320e9, 64), None, True), ((60e9, 64), None, False), ((0, 0), None, False), ((320e9, 64), 0, False)],
    ids=["bandwidth", "none to spare", "no kernels", "off"],
)
def test_a_server_measures_main_memory_and_the_slowest_rank_decides(
    found: tuple[float, int], asked: int | None, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def rates(gpu: int) -> tuple[int, int]:
        measured.append(gpu)
        return int(found[0]), found[1]

    def make(memory: MainMemory) -> Plan:
        flags = {} if asked is None else {"kt_cpuinfer": asked}
        return plan(channels=memory.rate / CHANNEL_RATE, cores=memory.cores, **flags)

    monkeypatch.setattr(scheduler_setup, "rate_for_experts", rates)
    args = ServerArgs(model_path=folder(MODEL), kt_cpuinfer=asked)
    slots = scheduler_setup._with_measured_cpus(ONE_REPLICA, args, 3, MainMemory(256 * GIB), make).expert_slots
    assert slots is not None and (slots.cpu_threads > 0) == threads
    assert measured == ([3] if asked is None else []), "nothing is measured where a flag decides"


def test_nothing_is_measured_for_models_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_setup, "rate_for_experts", None)
    args = ServerArgs(model_path=folder("Qwen3-30B-A3B"))
    made = scheduler_setup._with_measured_cpus(
        ONE_REPLICA, args, 0, MainMemory(), lambda memory: plan("Qwen3-30B-A3B", "rtx-pro-6000")
    )
    assert made.expert_slots is None


def test_experts_without_a_kernel_stay_the_gpus_without_a_flag() -> None:
    assert slots_of(channels=8, dtype="float16").cpu_threads == 0


def test_threads_without_experts_in_main_memory_are_noted() -> None:
    resident = plan("Qwen3-30B-A3B", "rtx-pro-6000", kt_cpuinfer=8)
    assert any("--kt-cpuinfer 8 has no effect" in note for note in resident.warnings)


def test_experts_that_cpus_have_no_kernel_for() -> None:
    said = refusal(dtype="float16", kt_cpuinfer=8)
    assert "--kt-cpuinfer: CPUs compute experts of models in bfloat16, not float16. Add --dtype bfloat16, or" in said


def test_more_threads_than_a_rank_can_have_are_refused() -> None:
    assert "--kt-cpuinfer 1000000000: a rank has at most 256 threads; use at most 256." in refusal(kt_cpuinfer=10**9)
    assert "use at most 513." in refusal(kt_cpuinfer=514, tp_size=2)


def test_tables_of_a_model_on_a_cpu_are_in_main_memory_anyway() -> None:
    made = plan("Qwen3-30B-A3B", "cpu", free=100, embed_in_main_memory=True)
    assert "--embed-in-main-memory has no effect: on a CPU all weights lie in main memory" in made.warnings
