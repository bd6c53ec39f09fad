"""What the replicas of a server on one machine decide alike: each plans for itself, what the first one found."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.managers.wire.ipc import Ports


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas that share this machine, which of them this is, and a directory of all of them, empty for one."""

    count: int = 1
    index: int = 0
    directory: str = ""

    @classmethod
    def of(cls, ports: Ports) -> Replicas:
        """Returns the replicas of which one has these ports."""
        return cls(ports.num_replicas, ports.replica, ports.root)

    def agree(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers of the process that came first with this name: free memory, for example, which those that
        come later find taken by the others."""
        if self.count == 1:
            return [*numbers]
        with Path(self.directory, f"{name}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if text := file.read():
                agreed: list[int] = json.loads(text)
                return agreed
            file.write(json.dumps([*numbers]))
            return [*numbers]


ONE_REPLICA = Replicas()
