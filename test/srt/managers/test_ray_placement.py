"""What a server takes of a Ray cluster, and what is said where the cluster has too little: without ray."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.http_server import PROCESSES_END_S
from sglang.srt.environ import Environment
from sglang.srt.errors import UserError
from sglang.srt.managers.launch import launch_engine
from sglang.srt.managers.ray_cluster.placement import ClusterNode, Demand, check_room, demand_of
from sglang.srt.server_args import ServerArgs


def demand(**flags: Any) -> Demand:
    return demand_of(ServerArgs.from_kwargs(model_path="m", use_ray=True, **flags))


def nodes(*gpus: int) -> list[ClusterNode]:
    return [ClusterNode(f"10.0.0.{index}", count, 64) for index, count in enumerate(gpus)]


def test_the_ranks_of_a_replica_are_packed_on_one_node() -> None:
    asked = demand(tp_size=4, pp_size=2, dp_size=3)
    assert asked.strategy == "STRICT_PACK" and asked.replicas == 3
    assert asked.bundles() == [{"GPU": 8.0}]


def test_several_machines_are_as_many_nodes() -> None:
    asked = demand(tp_size=8, pp_size=2, nnodes=2, dist_init_addr="10.0.0.1:50000")
    assert asked.strategy == "STRICT_SPREAD"
    assert asked.bundles() == [{"GPU": 8.0, "node:10.0.0.1": 0.001}, {"GPU": 8.0}], "machine 0 goes where it is named"


def test_cpus_serve_without_gpus() -> None:
    asked = demand(tp_size=2, device="cpu")
    assert asked.bundles() == [{"CPU": 2.0}]
    check_room(asked, nodes(0))


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        ({}, (), "The Ray cluster has no node that is alive."),
        (
            {},
            (0, 0),
            "no node has GPUs. The Ray cluster has 2 nodes with 0, 0 GPUs. With --device cpu ranks take CPUs.",
        ),
        ({"tp_size": 8}, (4, 4), "--tp-size 8 takes 8 GPUs of one node for the ranks of the server."),
        ({"tp_size": 8}, (4, 4), "--nnodes 2 spreads them over nodes."),
        (
            {"tp_size": 8},
            (2, 2),
            "takes 8 GPUs of one node for the ranks of the server. The Ray cluster has 2 nodes with",
        ),
        ({"tp_size": 8, "dp_size": 2}, (4, 4), "for the ranks of a replica"),
        ({"tp_size": 16, "nnodes": 2}, (8, 4, 4), "--nnodes 2 takes 2 nodes with 8 GPUs each, and 1 node has as many."),
        ({"tp_size": 4, "dp_size": 4}, (8, 4), "takes 16 GPUs, and there is room for 3 replicas."),
        ({"tp_size": 2, "dp_size": 2}, (3, 1), "takes 4 GPUs, and there is room for 1 replica."),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "10.0.0.9:1"}, (1, 1), "nodes are at 10.0.0.0, 10.0.0.1."),
    ],
)
def test_a_cluster_with_too_little_is_refused(flags: dict[str, Any], gpus: Sequence[int], said: str) -> None:
    with pytest.raises(UserError) as raised:
        check_room(demand(**flags), nodes(*gpus))
    assert said in str(raised.value)


def test_a_way_that_is_named_works() -> None:
    with pytest.raises(UserError, match="--nnodes 4 spreads"):
        check_room(demand(tp_size=8), nodes(3, 3, 3, 2))
    check_room(demand(tp_size=8, nnodes=4, dist_init_addr="10.0.0.3:1"), nodes(3, 3, 3, 2))


def _fits(counts: tuple[int, ...], each: int, machines: int, replicas: int) -> bool:
    """By trying every choice of nodes."""
    if replicas == 0:
        return True
    for chosen in itertools.combinations(range(len(counts)), machines):
        left = tuple(count - each * (index in chosen) for index, count in enumerate(counts))
        if min(left) >= 0 and _fits(left, each, machines, replicas - 1):
            return True
    return False


def test_room_is_what_trying_every_choice_finds() -> None:
    for counts in itertools.combinations_with_replacement(range(5), 3):
        for each, machines, replicas in itertools.product((1, 2), (1, 2, 3), (1, 2, 3)):
            asked = Demand(replicas, machines, each, "GPU", "flags")
            try:
                check_room(asked, nodes(*counts))
                room = True
            except UserError:
                room = False
            assert room == _fits(counts, each, machines, replicas), (counts, asked)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"node_rank": 1, "nnodes": 2, "tp_size": 2}, "remove --node-rank"),
        ({"base_gpu_id": 1}, "remove --base-gpu-id"),
        ({"dist_init_addr": "10.0.0.1:1"}, "it needs --nnodes above 1"),
        ({"dist_init_addr": "h:1", "nnodes": 2, "tp_size": 2, "dp_size": 2}, "is for one replica"),
        ({"nnodes": 2, "tp_size": 3}, "--nnodes 2 does not divide the 3 ranks"),
    ],
)
def test_flags_that_do_not_go_with_it_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        demand(**flags)
    assert said in str(raised.value)


def test_ray_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, device="cpu", use_ray=True)
    with pytest.raises(UserError, match=r"--use-ray needs ray on every node: pip install 'sm120-sglang\[ray\]'"):
        launch_engine(args)


def test_nodes_that_do_not_answer_hold_up_the_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of all replicas takes less time than `exit_guard` grants, by a clock that only ray's waits move."""
    now, killed = 100.0, list[Any]()

    def wait(refs: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += timeout
        return [], list(refs)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait, kill=killed.append))
    spec = importlib.util.find_spec("sglang.srt.managers.ray_cluster.placed_replica")
    assert spec is not None and spec.loader is not None
    placed_replica = importlib.util.module_from_spec(spec)  # not kept, because it has imported this stand-in for ray
    spec.loader.exec_module(placed_replica)
    monkeypatch.setattr(placed_replica, "time", SimpleNamespace(monotonic=lambda: now))
    machine = SimpleNamespace(end=SimpleNamespace(remote=lambda limit_s: "never"))
    replicas = [placed_replica.PlacedReplica([machine], ["10.0.0.1"], [()], lambda: None) for _ in range(3)]
    for replica in replicas:
        replica.tell_end(PROCESSES_END_S)
    for replica in replicas:
        replica.end(max(0.0, 100.0 + PROCESSES_END_S - now))
    assert now - 100.0 < Environment.SGLANG_END_TIMEOUT.default - 1.0 and killed == [machine] * 3
