"""Ctrl-C reaches children as well, also those that have not come to ignore it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from sglang.srt.utils.child_start import TERMINAL_SIGNALS, ignore_terminal, start_child


def report(pipe: Connection) -> None:
    """Tells that the imports are over, and after the next message that signals did no harm."""
    ignore_terminal()
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    pipe.send_bytes(b"unharmed")


def test_a_child_survives_signals_before_and_after_it_ignores_them() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=report, args=(theirs,), daemon=True)
    start_child(process)
    assert process.pid is not None
    for number in TERMINAL_SIGNALS:  # it has not imported anything yet
        os.kill(process.pid, number)
    assert ours.recv_bytes() == b"ready"
    for number in TERMINAL_SIGNALS:
        os.kill(process.pid, number)
    ours.send_bytes(b"go on")
    assert ours.recv_bytes() == b"unharmed"
    process.join(300)
    assert process.exitcode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(TERMINAL_SIGNALS), "this process hears them"
