"""The front's side of a Ray cluster: connects to it, takes a placement group for each replica, and starts an actor in
each of its bundles. If something cannot be had within seconds, everything is given back with an error."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.managers.ray_cluster.machine import Machine
from sglang.srt.managers.ray_cluster.placed_replica import PlacedReplica
from sglang.srt.managers.ray_cluster.placement import ClusterNode, Demand, check_room, demand_of
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.host_port import split_address
from sglang.version import __version__

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds for the head of a cluster to accept a connection."""
PLACEMENT_S = 20.0
"""Seconds to wait for resources that others use."""
JOIN_S = 30.0
"""Seconds for Ray to connect; without this limit it tries for minutes."""
ACTOR_S = 30.0
"""Seconds for an actor to start: Ray starts a process for it, which imports this package."""
PASSED_ON = ("SGLANG_", "NCCL_", "GLOO_", "HF_", "OMP_", "TRITON_", "TORCH_")
"""Prefixes of environment variables that ranks take over from the front."""


class RayCluster:
    """A connection to a cluster."""

    def __init__(self, joined: bool) -> None:
        """joined: whether `connect` connected this program, so that `leave` must disconnect it."""
        self._joined = joined
        self._groups: list[Any] = []

    @classmethod
    def connect(cls) -> RayCluster:
        """Connects to the cluster at RAY_ADDRESS, or to the one that this machine is in. Raises UserError."""
        if ray.is_initialized():
            return cls(joined=False)
        address = os.environ.get("RAY_ADDRESS", "auto")
        _check_head(address)
        if (reason := _join(address)) is not None:
            raise UserError(
                f"--use-ray: no Ray cluster is reachable ({reason}). Start one with `ray start --head`, add machines"
                " with `ray start --address HEAD:6379`, and start the server on one of them, or set RAY_ADDRESS."
            )
        return cls(joined=True)

    def start(
        self,
        args: ServerArgs,
        each_args: Sequence[ServerArgs],
        each_ports: Sequence[Ports],
        names: Sequence[str],
        on_change: Callable[[], None],
    ) -> tuple[list[Ports], list[PlacedReplica]]:
        """Places and starts the replicas, and returns the front's ports of each. on_change: as for EngineProcesses.
        Raises UserError."""
        demand = demand_of(args)
        check_room(demand, _nodes())
        groups = self._place(demand)
        environment = _environment()
        fronts: list[Ports] = []
        replicas = []
        with _ray_errors():
            actors = [[_actor(demand, group, index) for index in range(demand.machines)] for group in groups]
            end = time.monotonic() + ACTOR_S
            for group, machines, one, ports, name in zip(groups, actors, each_args, each_ports, names, strict=True):
                addresses = _addresses(group)
                facts = ray.get(
                    [machine.facts.remote(host) for machine, host in zip(machines, addresses, strict=True)],
                    timeout=max(1.0, end - time.monotonic()),
                )
                _check_releases(addresses, [version for version, _ in facts])
                meeting_port, *channel_ports = facts[0][1]
                meeting = args.dist_init_addr or f"{addresses[0]}:{meeting_port}"
                front, keys = ports.with_tcp_addresses(addresses[0], channel_ports)
                same = (front, keys, name, environment)
                meeting_address = meeting if demand.machines > 1 else None
                calls = [
                    (replace(one, base_gpu_id=0, node_rank=rank, dist_init_addr=meeting_address), *same)
                    for rank in range(demand.machines)
                ]
                logger.info("%s runs on %s", name or "The server", ", ".join(addresses))
                replicas.append(PlacedReplica(machines, addresses, calls, on_change))
                fronts.append(front)
        return fronts, replicas

    def leave(self) -> None:
        """Gives everything back, and disconnects if `connect` connected."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster is gone
                remove_placement_group(group)
        self._groups.clear()
        if self._joined and ray.is_initialized():
            ray.shutdown()

    def _place(self, demand: Demand) -> list[Any]:
        """Returns a placement group for each replica, once all of them have their resources."""
        for _ in range(demand.replicas):
            self._groups.append(placement_group(demand.bundles(), strategy=demand.strategy))
        end = time.monotonic() + PLACEMENT_S
        for group in self._groups:
            if not group.wait(timeout_seconds=max(0.1, end - time.monotonic())):
                free = ray.available_resources().get(demand.resource, 0.0)
                raise UserError(
                    f"--use-ray: {demand.flags} did not get its nodes within {PLACEMENT_S:g} s: other programs of the"
                    f" Ray cluster use them ({free:g} {demand.resource}s are free, in all). `ray status` shows them."
                )
        return list(self._groups)


def _check_head(address: str) -> None:
    """Raises UserError if nobody listens there: Ray would try for minutes."""
    try:
        host, port = split_address(address)
    except ValueError:  # "auto", or a form that Ray knows
        return
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"--use-ray: nobody answers at RAY_ADDRESS {address} ({error.strerror or error}). Is the head of the Ray"
            " cluster started, and its port open?"
        ) from error


def _join(address: str) -> str | None:
    """Connects this process to the cluster. Returns why that fails, or an empty text."""
    failures: list[str] = []

    def connect() -> None:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises many kinds: no cluster, another Python or Ray version
            failures.append((str(error).strip() or type(error).__name__).splitlines()[0])

    attempt = threading.Thread(target=connect, name="ray-connect", daemon=True)
    attempt.start()
    attempt.join(JOIN_S)
    if attempt.is_alive():
        return f"{address} does not answer within {JOIN_S:g} s"
    return failures[0] if failures else None


def _nodes() -> list[ClusterNode]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        ClusterNode(node["NodeManagerAddress"], *(int(node["Resources"].get(name, 0)) for name in ("GPU", "CPU")))
        for node in alive
    ]


def _actor(demand: Demand, group: Any, bundle: int) -> Any:
    """Starts the actor of a machine, with all resources of its bundle."""
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    gpus = demand.each if demand.resource == "GPU" else 0
    return (
        ray.remote(Machine)
        .options(
            num_gpus=gpus,
            num_cpus=0 if gpus else demand.each,
            max_concurrency=8,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        .remote()
    )


def _addresses(group: Any) -> list[str]:
    """Returns the node addresses of a group's bundles, in order."""
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [by_id[table[index]] for index in sorted(table)]


def _check_releases(addresses: Sequence[str], versions: Sequence[str]) -> None:
    others = [
        f"{host} has {version}" for host, version in zip(addresses, versions, strict=True) if version != __version__
    ]
    if others:
        raise UserError(
            f"--use-ray: this machine has sm120-sglang {__version__}, and node {', node '.join(others)}."
            " Install the same release everywhere."
        )


def _environment() -> Mapping[str, str]:
    """Returns the environment variables for ranks on other machines, with a secret for their messages to each other."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    return passed | {"SGLANG_DIST_SECRET": envs.SGLANG_DIST_SECRET or secrets.token_hex(32)}


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Converts Ray's errors about nodes to UserError."""
    try:
        yield
    except ray.exceptions.GetTimeoutError as error:
        raise UserError(
            f"--use-ray: a node did not start its process within {ACTOR_S:g} s; its Ray log says why."
        ) from error
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if any("No module named 'sglang" in line for line in lines):
            raise UserError(
                f"--use-ray: a node has no sm120-sglang {__version__} in the Python that runs Ray there."
            ) from error
        raise UserError(f"--use-ray: a node failed before its ranks were started: {lines[-1]}") from error
