"""Start of child processes that signals of the terminal do not disturb."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that reach a whole group of processes. The parent answers them; children end with it."""


def start_child(process: BaseProcess) -> None:
    """Starts a process with the terminal's signals blocked, because it could not ignore them before its imports are
    over. `ignore_terminal` in the child ends that."""
    resource_tracker.ensure_running()  # the start would do it, and unblock the signals then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal() -> None:
    """Ignores the terminal's signals from now on; those that came during the start are dropped."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)
