"""Candidates whose names say what they do, in processes of their own (measuring/test_processes.py)."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from sglang.measuring.points import Candidate, Point
from sglang.measuring.processes import Launched

FOREVER = 3600.0


@dataclass
class Fake:
    """A candidate whose name says what it does. `calls`: how often it was opened in its process."""

    name: str
    calls: int

    def problem(self) -> str:
        return "its numbers are wrong" if self.name == "wrong" else ""

    def seconds(self) -> float:
        if self.name == "crashes later":
            os.kill(os.getpid(), signal.SIGSEGV)
        return float(os.getpid())


COUNT = 0


def launch(point: Point, candidate: Candidate) -> Launched:
    global COUNT
    COUNT += 1
    if candidate.name == "crashes":
        os._exit(3)
    if candidate.name == "hangs":
        time.sleep(FOREVER)
    if candidate.name == "raises":
        raise RuntimeError("out of resources: shared memory\nand more")
    return Fake(candidate.name, COUNT)
