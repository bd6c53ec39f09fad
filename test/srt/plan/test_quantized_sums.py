"""Which sums over ranks travel in eight bits: from the flags, the links and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import quantized_sums
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import LIBRARY_PIECE_BYTES, MIB, PIECE_BYTES, QUANTIZED, quantized_from
from sglang.srt.kernels.spec import PeerLinks
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.quantized_sums import GROUP, QuantizedAllReduceRule, quantized_sum_rule
from sglang.srt.server_args import ServerArgs
from srt.models.harness import save_tiny

ARCH = arch_by_name("rtx-pro-6000-server")


def rule(
    topology: Topology | None = Topology.HOST_BRIDGE, hidden: int = 5120, problem: str = "", **flags: Any
) -> QuantizedAllReduceRule | None:
    args = ServerArgs.from_kwargs(model_path="x", **{"tp_size": 2, **flags})
    links = None if topology is None else PeerLinks(topology, problem)
    return quantized_sum_rule(args, ARCH, links, hidden, 256)


def test_nothing_is_quantized_unless_asked() -> None:
    assert rule() is None


@pytest.mark.parametrize(("mode", "rows"), [("prefill", 257), ("all", 1)])
def test_modes(mode: str, rows: int) -> None:
    found = rule(enable_quantized_all_reduce=mode)
    assert found is not None and (found.least_bytes, found.least_rows) == (MIB, rows)
    assert "predicted" in str(found)
    found = rule(enable_quantized_all_reduce=mode, quantized_all_reduce_min_bytes=4096)
    assert found is not None and (found.least_bytes, found.least_rows) == (4096, rows)


@pytest.mark.parametrize(
    ("topology", "ranks", "least"),
    [(Topology.HOST_BRIDGE, 2, 16), (Topology.CROSS_NUMA, 8, 8), (Topology.NVLINK, 2, 32)],
)
def test_what_nccl_sends_is_worth_its_launches_from_a_larger_size_on(
    topology: Topology, ranks: int, least: int
) -> None:
    found = rule(topology, problem="no peers", tp_size=ranks, enable_quantized_all_reduce="prefill")
    assert found is not None and found.least_bytes == least * MIB


@pytest.mark.parametrize(
    ("flags", "hidden", "says"),
    [
        ({"tp_size": 1}, 5120, "of which there is one"),
        ({}, 5136, "no multiple of 32"),
        ({"enable_quantized_all_reduce": "off", "quantized_all_reduce_min_bytes": 1}, 5120, "is for --enable"),
    ],
)
def test_what_cannot_be_followed_is_refused(flags: dict[str, Any], hidden: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        rule(hidden=hidden, **{"enable_quantized_all_reduce": "all", **flags})


def test_gpus_without_e4m3_are_refused() -> None:
    args = ServerArgs.from_kwargs(model_path="x", tp_size=2, enable_quantized_all_reduce="all")
    with pytest.raises(UserError, match="no instructions for e4m3"):
        quantized_sum_rule(args, arch_by_name("sm_80"), PeerLinks(Topology.HOST_BRIDGE), 5120, 256)


def test_every_group_has_a_least_size() -> None:
    for topology in Topology:
        for ranks in range(2, 17):
            least, reason = quantized_from(topology, ranks)
            later, why = quantized_from(topology, ranks, by_library=True)
            assert MIB <= least <= later <= 32 * MIB and reason and why
    assert quantized_from(None, 4) == (0, "ranks on CPUs")
    assert all(tile_config.reason for tile_config in QUANTIZED)


def test_numbers_are_those_of_the_sums() -> None:
    assert quantized_sums.GROUP == GROUP and PIECE_BYTES % (2 * GROUP) == 0 == LIBRARY_PIECE_BYTES % (2 * GROUP)


def test_the_plan_says_it(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)

    def plan(**flags: Any) -> Plan:
        args = ServerArgs.from_kwargs(model_path=str(tmp_path), tp_size=2, max_running_requests=5, **flags)
        return make_plan(args, ModelConfig.from_server_args(args), ARCH, 40 << 30)

    asked = plan(enable_quantized_all_reduce="prefill")
    assert asked.quantized_sums == QuantizedAllReduceRule(0, 6, "ranks on CPUs")
    assert "6 rows" in asked.describe()["quantized_sums"]
    assert "quantized_sums" not in plan().describe()
