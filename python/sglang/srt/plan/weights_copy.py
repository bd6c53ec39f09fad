"""Plans the copy of the weights that a server keeps in main memory while it sleeps. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class WeightsCopy:
    """The copy of one rank."""

    bytes: int
    """Page-locked, of one rank."""
    ranks: int
    """Ranks of a machine."""
    always: bool
    """Whether every sleep keeps it (--enable-weights-cpu-backup), and not only `/sleep?level=1`."""

    @property
    def total(self) -> int:
        """Returns the bytes of all ranks of a machine."""
        return self.bytes * self.ranks

    def describe(self) -> dict[str, Any]:
        """Returns the sizes for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        when = "asleep" if self.always else "asleep by /sleep?level=1"
        return (
            f"{self.total / GIB:.2f} GiB of main memory keep the weights {when}, {self.ranks} x {self.bytes / GIB:.2f}"
        )


def plan_weights_copy(
    args: ServerArgs, weights: int, ranks: int, host_bytes: int | None
) -> tuple[WeightsCopy | None, list[str]]:
    """Returns the copy, None for a server that does not sleep, and notes. weights: bytes of one rank. ranks: of a
    machine. host_bytes: free main memory that nothing else of the server takes; None: unknown."""
    if not args.enable_memory_saver:
        return None, []
    copy = WeightsCopy(weights, ranks, args.enable_weights_cpu_backup)
    if host_bytes is None or copy.total <= host_bytes:
        return copy, []
    left = f"{copy}; {host_bytes / GIB:.2f} GiB are free: such a sleep will be refused."
    return copy, [f"{left} /sleep?level=2 reads the weights again instead."]
