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
"""What takes less was compiled before, and was read from Triton's cache."""


@dataclass(slots=True)
class LateCompiles:
    """A watch over one process: names of kernels that were compiled, with seconds."""

    kernels: list[tuple[str, float]] = field(default_factory=list)
    _started: float = 0.0

    def begins(self, **_: Any) -> bool:
        """Called by Triton before it compiles a kernel or reads it from its cache. Returns False: it shall."""
        self._started = time.perf_counter()
        return False

    def ends(self, *, fn: Any, repr: str = "", **_: Any) -> None:
        """Called by Triton afterwards."""
        seconds = time.perf_counter() - self._started
        if seconds < COMPILED_S:
            return
        self.kernels.append((fn.name, seconds))
        logger.warning(
            "%s was compiled while requests waited: %.2f s, once a machine (Triton keeps it in its cache)",
            fn.name.rpartition(".")[2],
            seconds,
        )
        logger.info("Its form: %s", repr)


def watch() -> LateCompiles | None:
    """Watches the kernels of this process from now on; None where Triton is not installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    late = LateCompiles()
    knobs.runtime.jit_cache_hook = late.begins  # type: ignore[assignment]
    knobs.runtime.jit_post_compile_hook = late.ends  # type: ignore[assignment]
    return late
