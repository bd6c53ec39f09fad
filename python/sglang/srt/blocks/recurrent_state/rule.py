"""Rules of recurrence: how a head's state decays and takes up values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which a state changes. With `delta` it is the gated delta rule (arXiv 2412.06464): a value replaces
    the one stored for its key. Without, it is state-space duality (Mamba-2, arXiv 2405.21060): a value is added,
    weighted by a time step within [dt_min, dt_max].

    `scale` multiplies the queries. With `by_channel` each key channel has its own decay (Kimi delta attention, arXiv
    2510.26692). Its log lies between `lower_bound` and 0, by a sigmoid instead of softplus, or is unbounded if
    `lower_bound` is 0.
    """

    delta: bool
    scale: float = 1.0
    dt_min: float = 0.0
    dt_max: float = float("inf")
    by_channel: bool = False
    lower_bound: float = 0.0


def gated_delta_rule(key_dim: int) -> Rule:
    """Returns the rule of the gated delta net."""
    return Rule(delta=True, scale=key_dim**-0.5)


def kimi_delta_rule(key_dim: int, lower_bound: float) -> Rule:
    """Returns the rule of Kimi delta attention."""
    return Rule(delta=True, scale=key_dim**-0.5, by_channel=True, lower_bound=lower_bound)
