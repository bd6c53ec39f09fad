"""What an execution stops at: an instruction that is not known, and an access that hardware may let pass."""

from __future__ import annotations


class Unsupported(RuntimeError):
    """Raised for PTX that the executor does not know, by name."""


class Hazard(RuntimeError):
    """Raised for what has no defined result: an access outside of an allocation, a misaligned one, a read of what
    nobody wrote, a race in shared memory, a barrier that not all threads reach. `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


KINDS = ("out of bounds", "misaligned", "uninitialized", "race", "barrier", "divergence", "endless")
