"""Creates an all-reduce over peers' GPU memory for a group, if its links can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang.srt.distributed.custom_all_reduce import (
    TWO_SHOT_E4M3,
    CustomAllReduce,
    IpcWorkspaces,
    PeerMemoryError,
    data_vectors_for,
    exchange,
)
from sglang.srt.distributed.flashinfer_fusion import create_fusion
from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.peer_probe import LINKS, probe
from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import SizeRange, exchanges_for, ranges_for
from sglang.srt.kernels.spec import PeerLinks

if TYPE_CHECKING:
    from sm120_sgl_kernel import Collectives

logger = logging.getLogger(__name__)


def _installed() -> Collectives:
    from sm120_sgl_kernel import installed_collectives

    return installed_collectives()


def connect(
    group: dist.ProcessGroup,
    device: int,
    topology: Topology,
    deadline_s: float,
    load_library: Callable[[], Collectives] = _installed,
    links: str = LINKS,
    e4m3_bytes: int = 0,
) -> tuple[PeerLinks, CustomAllReduce | None]:
    """Probes the links of a group, then opens its workspaces. `group`: of the hosts; `deadline_s`: of waits for a rank;
    `e4m3_bytes`: as in CustomAllReduce. Returns the links and the all-reduce; if it is None, the links say why, alike
    on every rank, and rank 0 logs it. Collective. Raises UserError if NCCL itself cannot be trusted."""
    problem, reducer = _library_problem(group, load_library), None
    if not problem:
        problem = probe(group, device, links) or ""
    if not problem:
        library, ranks = load_library(), dist.get_world_size(group)
        rows, parts = ranges_for(topology, ranks), exchanges_for(topology, ranks)
        try:
            e4m3 = [SizeRange(frozenset(), frozenset(), TWO_SHOT_E4M3, e4m3_bytes, "")] if e4m3_bytes else []
            needed = data_vectors_for((*rows, *e4m3), ranks, library.ROW_VECTORS, parts)
            workspaces = IpcWorkspaces(library, group, device, needed)
            reducer = CustomAllReduce(library, workspaces, rows, deadline_s, e4m3_bytes=e4m3_bytes, parts=parts)
        except PeerMemoryError as error:
            problem = f"the GPUs' memory cannot be shared: {error}"
    if problem and dist.get_rank(group) == 0:
        logger.warning("The ranks exchange data through NCCL alone, which is slower for small messages: %s", problem)
    return PeerLinks(topology, problem), reducer


def _library_problem(group: dist.ProcessGroup, load_library: Callable[[], Collectives]) -> str:
    """Returns why some rank cannot load the library; "" if all can."""
    problem = ""
    try:
        load_library()
    except (OSError, RuntimeError) as error:
        problem = f"sgl-kernel: {error}"
    return next((answer.decode() for answer in exchange(group, problem.encode()) if answer), "")


def fused_by_flashinfer(
    group: Group, host_group: dist.ProcessGroup, hidden_size: int, dtype: str, others: CustomAllReduce | None
) -> str:
    """Uses FlashInfer for all-reduces followed by a norm, over probed links, and `others` for the rest. Returns why
    not, alike on every rank, or "". Collective."""
    fusion, problem = create_fusion(group.communicator(), host_group, hidden_size, getattr(torch, dtype), others)
    if fusion is not None:
        group.reduce_with(fusion)
    elif host_group.rank() == 0:
        logger.warning("--enable-flashinfer-allreduce-fusion: %s", problem)
    return problem
