"""Rules of recurrence: how the state of a head forgets and what it takes up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule by which a state changes. With `delta` it is the gated delta rule (arXiv 2412.06464): a value replaces what
    its key had. Without, it is state-space duality (Mamba-2, arXiv 2405.21060): a value is added, weighted by a time
    step within [dt_min, dt_max].

    `scale` multiplies the queries. With `by_channel` each channel of a head's keys forgets at a rate of its own (Kimi
    delta attention, arXiv 2510.26692); the log of a decay then lies between `lower_bound` and 0, by a sigmoid in place
    of softplus, or with `lower_bound` 0 anywhere below 0.
    """

    delta: bool
    scale: float = 1.0
    dt_min: float = 0.0
    dt_max: float = float("inf")
    by_channel: bool = False
    lower_bound: float = 0.0


def gated_delta_rule(key_dim: int) -> Rule:
    return Rule(delta=True, scale=key_dim**-0.5)


def kimi_delta_rule(key_dim: int, lower_bound: float) -> Rule:
    return Rule(delta=True, scale=key_dim**-0.5, by_channel=True, lower_bound=lower_bound)
