"""Attaches a store of cached prefixes to a running server, and detaches it, on all ranks or on none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.storage_backend import StorageConfig, read_storage_config
from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import free_main_memory
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import open_store
from sglang.srt.mem_cache.storage.engine import StorageEngine
from sglang.srt.plan.host_cache import GIB, left_by_the_store

logger = logging.getLogger(__name__)

NO_TIER = (
    "There is no prefix cache in main memory, which a store is behind: start the server with"
    " --enable-hierarchical-cache, and see its log if it was."
)


def describe(scheduler: Scheduler | AttentionGroups) -> dict[str, Any]:
    """Returns the store's settings under SGLang's names; all None without a store."""
    tier = next(iter(scheduler.host_tiers), None)
    config = None if tier is None or tier.storage is None else tier.storage.config
    return {
        "hicache_storage_backend": None if config is None else config.backend,
        "hicache_storage_prefetch_policy": None if config is None else config.prefetch_policy,
        "hicache_write_policy": None if tier is None else tier.write_policy,
    }


def attach(scheduler: Scheduler | AttentionGroups, args: Mapping[str, Any]) -> str:
    """Attaches a store. Returns why that fails on some rank; "" on success. A collective."""
    problem = _refusal_while_busy(scheduler)
    if problem:
        return problem
    tiers = scheduler.host_tiers
    if tiers[0].storage is not None:
        return "A store is attached: detach it first."
    config: StorageConfig | None = None
    try:
        policy = args["prefetch_policy"] or scheduler.args.hicache_storage_prefetch_policy
        config = read_storage_config(args["backend"], policy, args["extra"])
        assert config is not None
        taken = _memory_of(scheduler, config)
    except UserError as error:
        logger.error("A store of cached prefixes is refused: %s", error)
        problem = str(error)
    if not parallel_state.all_reduce_min([int(not problem)])[0]:  # before any rank takes the memory
        return problem or "Another rank cannot have the store; its log says why."
    assert config is not None
    engine: StorageEngine | None = None
    try:
        engine = open_store(scheduler.args, scheduler.runner, parallel_state.rank(), config)
    except UserError as error:
        logger.error("A store of cached prefixes is refused: %s", error)
        problem = str(error)
    except Exception as error:  # a custom class may raise anything
        logger.exception("A store of cached prefixes cannot be attached")
        problem = f"The store cannot be opened: {error!r}."
    if not parallel_state.all_reduce_min([int(engine is not None)])[0]:
        if engine is not None:
            engine.close()
        return problem or "Another rank cannot open the store; its log says why."
    assert engine is not None
    scheduler.attach_storage(config, engine)
    if args["write_policy"] is not None:
        for tier in tiers:
            tier.use_policy(args["write_policy"])
    logger.info("Cached prefixes are kept by the backend %s from now on%s", config.backend, taken)
    return ""


def _memory_of(scheduler: Scheduler | AttentionGroups, config: StorageConfig) -> str:
    """Says what main memory the store's library takes, which the plan could not count. Raises UserError if that is more
    than is free."""
    if not config.rank_bytes:
        return ""
    cache = scheduler.runner.plan.host_cache
    assert cache is not None, "without a tier nothing is attached"
    ranks = cache.processes * cache.sharers
    left_by_the_store(config, free_main_memory(), ranks)
    return f"; it takes {config.rank_bytes / GIB:.2f} GiB of main memory in each of {ranks} ranks"


def detach(scheduler: Scheduler | AttentionGroups, undo: bool = False) -> str:
    """Detaches the store. undo: as if it had never been attached, because other replicas refused it. Returns why that
    fails; "" on success, or if there was none. A collective."""
    problem = _refusal_while_busy(scheduler)
    if not problem:
        for tier in scheduler.host_tiers:
            tier.detach(undo)
    return problem


def _refusal_while_busy(scheduler: Scheduler | AttentionGroups) -> str:
    if not scheduler.host_tiers:
        return NO_TIER
    scheduler.sync()
    if scheduler.reqs:
        return f"{len(scheduler.reqs)} requests run or wait: a store is attached and detached when there are none."
    return ""
