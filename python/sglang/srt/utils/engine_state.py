"""The state of an engine's memory and weights, which its scheduler and its front each keep: awake, asleep by tags, or
with weights that must not be used.

Every change has a method, which returns what is to be done; calls that change nothing are allowed. The scheduler's
state says what is mapped. The front's follows the scheduler's answers, and refuses requests by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (CUDA_GRAPH, WEIGHTS, KV_CACHE)
"""In the order in which they wake: caches come last, so that new weights have room before."""


class StateError(ValueError):
    """A change that the state does not allow."""


def checked_tags(tags: Collection[str] | None) -> tuple[str, ...]:
    """Returns tags in the order in which they wake; all for None or an empty list. Raises StateError."""
    if not tags:
        return TAGS
    if unknown := sorted(set(tags) - set(TAGS)):
        raise StateError(f"unknown tag {unknown[0][:64]!r}; known: {', '.join(TAGS)}")
    return tuple(tag for tag in TAGS if tag in tags)


@dataclass(slots=True)
class EngineState:
    """The state of one engine."""

    asleep: set[str] = field(default_factory=set)
    """Tags whose memory is given back."""
    weights_lost: bool = False
    """The weights were given back without a copy: they must be read again, or come with an update."""
    broken: str = ""
    """Why the weights must not be used, such as an update that failed half-way; "" if they may."""

    @property
    def serves(self) -> bool:
        """Returns whether requests can be computed."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Returns why requests cannot be computed; "" if they can."""
        if self.broken:
            return f"The weights cannot be used: {self.broken}"
        if self.asleep:
            return f"The server sleeps ({', '.join(tag for tag in TAGS if tag in self.asleep)})."
        if self.weights_lost:
            return "The server is awake without its weights: send them, or read them again."
        return ""

    def refuse_without_weights(self) -> None:
        """Raises StateError unless the weights are mapped, so that they can be read or written."""
        if WEIGHTS in self.asleep:
            raise StateError("the weights are asleep: wake them first, with the tag weights")

    def to_sleep(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Returns which of these tags are awake."""
        return tuple(tag for tag in tags if tag not in self.asleep)

    def to_wake(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Returns which of these tags are asleep."""
        return tuple(tag for tag in tags if tag in self.asleep)

    def slept(self, tags: Sequence[str], has_copy: bool) -> None:
        """Notes that the memory of these tags was given back. has_copy: of the weights, in main memory."""
        self.asleep.update(tags)
        if WEIGHTS in tags and not has_copy:
            self.weights_lost = True

    def woke(self, tags: Sequence[str]) -> None:
        """Notes that these tags have memory again, and their content where there is a copy."""
        self.asleep.difference_update(tags)

    def weights_restored(self) -> None:
        """Notes that all weights were read or sent: whatever was wrong with them is over."""
        self.weights_lost, self.broken = False, ""

    def break_weights(self, why: str) -> None:
        """Notes that the weights must not be used until all of them were read or sent again."""
        self.broken = why

    def to_wire(self) -> dict[str, object]:
        """Returns the state for an answer of the scheduler."""
        return {"asleep": sorted(self.asleep), "weights_lost": self.weights_lost, "broken": self.broken}

    def follow(self, said: dict[str, object]) -> None:
        """Takes over the state that a scheduler's answer has."""
        asleep = said["asleep"]
        assert isinstance(asleep, list)
        self.asleep, self.weights_lost, self.broken = set(asleep), bool(said["weights_lost"]), str(said["broken"])
