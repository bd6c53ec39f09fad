"""Programmatic dependent launch: a kernel may start while the one before it ends, and waits where it first needs data.

Off until the model runner switches it on for a GPU that has the `pdl` feature. A kernel takes `PDL: tl.constexpr` and,
when it is set, first issues the loads of what no other kernel writes (weights), then waits, and
only then reads or writes anything else. Every kernel so launched waits, so that the order of all memory accesses stays
that of the stream.
"""

from __future__ import annotations

from typing import Any

_options: dict[str, Any] = {"PDL": False}


def enable(on: bool) -> None:
    """For all later launches of this process. Graphs captured before keep what they were captured with."""
    global _options
    _options = {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def options() -> dict[str, Any]:
    """Keyword arguments of a launch."""
    return _options
