"""Pools of cached prefixes in main memory, and the copies between them and the device."""

from __future__ import annotations

import logging
from functools import partial

from sglang.srt.distributed import parallel_state
from sglang.srt.mem_cache.copy_engine import ThreadedCopies
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.mem_cache.page_pool import Allocate, page_pools, private_memory
from sglang.srt.mem_cache.shared_memory import SharingFailed, shared_tensor
from sglang.srt.plan.host_cache import HostCachePlan
from sglang.srt.plan.plan import Plan

logger = logging.getLogger(__name__)


def create_copies(plan: Plan, host: HostCachePlan, pools: CachePools) -> ThreadedCopies | None:
    """Creates the pools in main memory, shared by ranks with equal caches; None if these ranks cannot map the same
    memory. Collective."""
    share = (0, 1)
    allocate: Allocate = private_memory
    if host.sharers > 1:
        share = (parallel_state.rank(), host.sharers)
        allocate = partial(shared_tensor, first=share[0] == 0, agree=parallel_state.all_reduce_min)
    try:
        in_main_memory = page_pools(pools, plan.pool_sizes, host.sizes, allocate)
    except SharingFailed:
        logger.warning("No prefixes are kept in main memory: the ranks cannot map the same memory by /proc/PID/fd")
        return None
    copies = ThreadedCopies(in_main_memory, plan.device)
    copies.share = share
    copies.populate()
    return copies
