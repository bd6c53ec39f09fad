"""Says which Triton kernels are compiled after start-up, while requests wait.

A server's start compiles what its steps are known to launch. A kernel that is first needed later holds up every request
until it is compiled (0.2 to 5 s), once a machine, as Triton keeps what it compiled in its cache.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

COMPILED_S = 0.05
"""Kernels that take less time were not compiled but read from Triton's cache, where an earlier start left them."""


@dataclass(slots=True)
class LateCompiles:
    """A watch over this process: the kernels that were compiled late, with seconds."""

    kernels: list[tuple[str, float]] = field(default_factory=list)
    _started: float = 0.0

    def begins(self, **_: Any) -> bool:
        """Notes the time; Triton calls it before it compiles a kernel or reads it from its cache. Returns False, so
        that Triton goes on."""
        self._started = time.perf_counter()
        return False

    def ends(self, *, fn: Any, **_: Any) -> None:
        """Records and logs a late compilation, and logs a late read of the cache; Triton calls it afterwards."""
        seconds, name = time.perf_counter() - self._started, fn.name.rpartition(".")[2]
        if seconds < COMPILED_S:
            logger.info("%s was read from Triton's cache while requests waited: %.0f ms", name, 1000 * seconds)
            return
        self.kernels.append((fn.name, seconds))
        logger.warning(
            "%s was compiled while requests waited: %.2f s, once a machine (Triton keeps it in its cache)",
            name,
            seconds,
        )


def watch() -> LateCompiles | None:
    """Watches the kernels of this process from now on. Returns None where Triton is not installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    late = LateCompiles()
    knobs.runtime.jit_cache_hook = late.begins  # type: ignore[assignment]
    knobs.runtime.jit_post_compile_hook = late.ends  # type: ignore[assignment]
    return late
