"""A rank of a server that kills itself inside a step that runs as two halves, at a collective that is known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TWO_BATCH_THRESHOLDS = ("--enable-two-batch-overlap", "--two-batch-overlap-min-tokens", "2")
COLLECTIVES = {"first half": 5, "second half": 6}
"""Which one of a step a rank does not come to: the halves take turns."""
PROMPT = list(range(5, 85))
"""Token ids of a prompt that has as many collectives in each half."""
_DIES = """
import os, signal, sys, threading, time

def patch():
    while not hasattr(sys.modules.get("sglang.srt.distributed.ping_pong"), "PingPong"):
        time.sleep(0.05)
    turns, count = sys.modules["sglang.srt.distributed.ping_pong"].PingPong, 0
    start = turns.start

    def dies(self, what, collective):
        nonlocal count
        count += os.path.exists({armed!r})
        if count == {collective} and sys.modules["torch"].distributed.get_rank() == {rank}:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, what, collective)

    turns.start = dies

threading.Thread(target=patch, daemon=True).start()
"""


def dies_inside(half: str, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets the rank of every server that starts from now on kill itself inside `half`. Returns the file that arms it:
    it counts collectives as long as the file is there."""
    armed = folder / "armed"
    text = _DIES.format(armed=str(armed), collective=COLLECTIVES[half], rank=rank)
    (folder / "sitecustomize.py").write_text(text)  # which Python runs when a process starts
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    return armed
