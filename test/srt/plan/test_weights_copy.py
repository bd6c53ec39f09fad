"""What a sleeping server keeps in main memory is counted, and what does not fit is said at the start."""

from __future__ import annotations

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.weights_copy import GIB
from sglang.srt.server_args import ServerArgs


def planned(host_gib: int, **flags: object) -> Plan:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, **flags)
    arch = arch_by_name("sm_120")
    return make_plan(args, ModelConfig.from_server_args(args), arch, 90 * GIB, host_bytes=host_gib * GIB)


def test_a_server_that_does_not_sleep_keeps_nothing() -> None:
    assert planned(64).weights_copy is None
    assert "weights_copy" not in planned(64).describe()


@pytest.mark.parametrize("backup", [False, True])
def test_the_copy_is_as_large_as_the_weights_of_all_ranks(backup: bool) -> None:
    plan = planned(64, enable_memory_saver=True, enable_weights_cpu_backup=backup, tp_size=2)
    assert plan.weights_copy is not None
    assert (plan.weights_copy.bytes, plan.weights_copy.ranks) == (plan.memory.weights, 2)
    assert plan.describe()["weights_copy"] == {"bytes": plan.memory.weights, "ranks": 2, "always": backup}
    assert ("by /sleep?level=1" in str(plan.weights_copy)) != backup
    assert not [line for line in plan.warnings if "keep the weights" in line]


def test_a_copy_without_room_is_said_at_the_start() -> None:
    flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    assert any("such a sleep will be refused" in line for line in planned(0, **flags).warnings)


def test_cached_prefixes_get_what_the_copy_leaves() -> None:
    flags = {"enable_hierarchical_cache": True, "enable_memory_saver": True, "max_total_tokens": 200_000}
    without, beside = (planned(2, **flags, enable_weights_cpu_backup=backup) for backup in (False, True))
    assert without.host_cache is not None and beside.host_cache is not None and beside.weights_copy is not None
    assert 0 < without.host_cache.total_bytes - beside.host_cache.total_bytes
