"""Shared arrays of the front on machines that do not share its memory: written again, part by part, by one rank of
each, so that all ranks read pixels as those of one machine do."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.wire.io_struct import ArrayPart, ArraysGone, ControlReply
from sglang.srt.plan.layout import asked_node
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import shared_array
from sglang.srt.utils.shared_array import SharedArrayError

NO_ROOM = "A machine of the server has no room in shared memory for the image now; try again later."


class ReceivedArrays:
    def __init__(self, args: ServerArgs, directory: Path) -> None:
        """directory: of shared arrays, on this machine."""
        node = asked_node(args)
        shares_memory = node.answers and not args.use_ray
        self._writes = parallel_state.rank() == node.ranks[0] and not shares_memory
        self._directory = directory

    def add(self, part: ArrayPart) -> ControlReply:
        """Returns the answer when all machines have the part, or one cannot take it. Collective."""
        reason = NO_ROOM
        try:
            if self._writes:
                shared_array.append(self._directory, part.array, part.offset, part.data)
        except (OSError, SharedArrayError) as error:
            taken, reason = False, f"{NO_ROOM} ({error})"
        else:
            taken = True
        everywhere = parallel_state.all_ranks_say(taken)
        return ControlReply(part.id, everywhere, "" if everywhere else reason)

    def remove(self, gone: ArraysGone) -> None:
        if self._writes:
            for name in gone.names:
                shared_array.remove_named(self._directory, name)
