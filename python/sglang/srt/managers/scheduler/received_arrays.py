"""Shared arrays of the front on machines that do not share its memory: one rank of each machine writes them again, part
by part, so that all its ranks can read pixels as on the front's machine."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.wire.io_struct import ArrayPart, ArraysReleased, ControlReply
from sglang.srt.plan.layout import asked_node
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import shared_array
from sglang.srt.utils.shared_array import SharedArrayError

NO_ROOM = "A machine of the server has no room in shared memory for the image now; try again later."


class ReceivedArrays:
    """Writes received arrays to this machine's memory."""

    def __init__(self, args: ServerArgs, directory: Path) -> None:
        """directory: of shared arrays on this machine."""
        node = asked_node(args)
        shares_memory = node.answers and not args.use_ray
        self._writes = parallel_state.rank() == node.ranks[0] and not shares_memory
        self._directory = directory

    def add(self, part: ArrayPart) -> ControlReply:
        """Writes a part. Returns the answer once all machines have it, or one cannot take it. A collective."""
        reason = NO_ROOM
        try:
            if self._writes:
                shared_array.append(self._directory, part.array, part.offset, part.data)
        except (OSError, SharedArrayError) as error:
            taken, reason = False, f"{NO_ROOM} ({error})"
        else:
            taken = True
        everywhere = parallel_state.all_ranks_agree(taken)
        return ControlReply(part.id, everywhere, "" if everywhere else reason)

    def remove(self, gone: ArraysReleased) -> None:
        if self._writes:
            for name in gone.names:
                shared_array.remove_named(self._directory, name)
