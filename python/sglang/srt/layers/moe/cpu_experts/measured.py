"""What CPUs of this machine could do for experts in main memory, as a server finds out before it plans them."""

from __future__ import annotations

import ctypes
import fcntl
import logging

from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.hardware.cpu_cores import cores
from sglang.srt.hardware.numa import usable_cpus
from sglang.srt.layers.moe.cpu_experts.doorbell import why_no_doorbell
from sglang.srt.layers.moe.cpu_experts.library import load_library

logger = logging.getLogger(__name__)

SECONDS = 0.3
ALL_BYTES = 2 << 30
"""Bytes that all threads read over and over, more than caches hold; of many threads each has at least LEAST_BYTES."""
LEAST_BYTES = 64 << 20


def read_rate() -> tuple[float, int]:
    """Returns the bytes a second that the physical cores of this machine read together, and their number. One process
    at a time measures. Raises UserError where CPUs have no kernels."""
    library = load_library()
    if library.cpu_experts_kernels(0) is None:
        raise UserError("CPUs cannot compute experts: this CPU has no AVX2")
    usable = cores(allowed=usable_cpus())
    numbers = (ctypes.c_int * len(usable))(*usable)
    lock = envs.SGLANG_CACHE_DIR / "cpu_experts" / "measuring"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        each = max(LEAST_BYTES, ALL_BYTES // len(usable))
        return float(library.cpu_experts_read_rate(len(usable), numbers, each, SECONDS)), len(usable)


def rate_for_experts(device_index: int) -> tuple[int, int]:
    """Returns `read_rate` for a GPU's experts, (0, 0) where CPUs cannot compute them. Says which in the log."""
    try:
        if problem := why_no_doorbell(device_index):
            raise UserError(f"CPUs cannot compute experts: {problem}")
        rate, num_cores = read_rate()
    except (UserError, OSError) as problem:
        logger.info("Experts stay the GPU's: %s", problem)
        return 0, 0
    logger.info("%d cores read %.0f GB/s of main memory together", num_cores, rate / 1e9)
    return int(rate), num_cores
