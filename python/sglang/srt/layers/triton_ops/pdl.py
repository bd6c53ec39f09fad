"""Programmatic dependent launch: a kernel may start while the one before it ends, and waits where it first needs data.

Off until the model runner switches it on for a GPU that has the `pdl` feature. A kernel takes `PDL: tl.constexpr` and,
when it is set, first issues the loads of what the kernel directly ahead does not write, then waits, and only then reads
or writes anything else.

All programs of such a kernel wait, and let the next one begin only then. So where a kernel begins, every kernel but the
one directly ahead has ended, and what those wrote is there: weights, and what a step has ready before its layers (the
plan of attention, request slots, tokens). Nothing is written before the wait, so that what an earlier kernel reads is
not overwritten: the order of the stream holds.
"""

from __future__ import annotations

from typing import Any

_options: dict[str, Any] = {"PDL": False}


def enable(on: bool) -> None:
    """Turns dependent launches on or off for all later launches of this process. Graphs keep the setting of their
    capture."""
    global _options
    _options = {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def options() -> dict[str, Any]:
    """Returns the keyword arguments of a launch."""
    return _options
