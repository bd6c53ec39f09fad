"""What a plan says of experts in main memory: their sizes, and predictions. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from sglang.srt.hardware.arch import ArchTraits

GIB = 1024**3
HIT_SHARES = ((0.0, 0.0), (0.02, 0.10), (0.09, 0.28), (0.18, 0.44), (0.36, 0.62), (0.55, 0.72), (0.73, 0.79), (1, 1))
"""(slots of a layer / its experts, share of the chosen experts that are found in slots), as others measured it with
Qwen3.8-Flash-Next in one conversation."""
FETCHED = 0.9
"""Share of the bus's rate that copies of experts reach."""
READ_RATE = 0.865
"""Share of the memory's rate that decode steps reach."""
LAYER_S, STEP_S = 60e-6, 1.5e-3
"""Seconds of a layer and of a step besides reading weights."""
PCIE5, PCIE4 = 55e9, 25e9
"""Bytes a second over 16 lanes."""
CHANNEL_RATE = 38e9
"""Bytes a second of a channel of DDR5-5600 that copies reach."""


BUFFERS = 2
"""Buffers for experts that are in no slot: those in one arrive while those in the other are computed with."""


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Sizes in GPU memory: slots of each layer, and the most experts that each of the buffers holds, which layers
    share."""

    slots: int
    buffered: int


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Main memory for experts. `free`: bytes on the machine that can be page-locked; None: unknown, and experts stay
    on the GPU unless a flag asks. `rate`: bytes a second that all CPUs together read; 0: unknown, and enough for the
    bus of every GPU. `cores`: physical cores that may compute; 0: as many as are wanted."""

    free: int | None = None
    rate: float = 0.0
    cores: int = 0


UNKNOWN = MainMemory()


@dataclass(frozen=True, slots=True)
class ExpertSlotPlan:
    """The experts in main memory of one rank, and predictions for them, in seconds."""

    layers: int
    experts: int
    slots: int
    buffered: int
    """Experts in each of the buffers."""
    host_bytes: int
    processes: int
    """Ranks of this machine."""
    banks: int
    """Banks in its main memory: replicas share those of their ranks."""
    decode_one: float
    decode_eight: float
    prompt: float
    """Of a prompt of one chunk."""
    chunk: int
    chosen: float
    """Experts of a layer that a token chooses on this rank."""
    rate: float
    """Bytes a second that copies of experts reach."""
    cpu_threads: int = 0
    """Threads of the rank that compute some of the experts which a step lacks."""

    def used_bytes(self, tokens: int) -> float:
        """Predicts the bytes of the distinct experts that so many tokens of a step choose, each for itself."""
        return float(self.host_bytes * (1 - (1 - min(1.0, self.chosen / self.experts)) ** tokens))

    def copied_bytes(self, tokens: int) -> float:
        """Predicts the bytes of these that are in no slot. Slots hold what they can of a step that needs more."""
        used, share = self.used_bytes(tokens), self.slots / self.experts
        return max(used * (1 - hit_share(share)), used - self.host_bytes * share)

    def copy_seconds(self, tokens: int) -> float:
        """Predicts the time of these copies."""
        return self.copied_bytes(tokens) / self.rate

    def tokens_per_second(self, num_requests: int) -> float:
        """Predicts the tokens a second of so many requests together; more than eight gain nothing that is counted."""
        of_eight = min(num_requests - 1, 7) / 7
        return min(num_requests, 8) / (self.decode_one + (self.decode_eight - self.decode_one) * of_eight)

    def describe(self) -> dict[str, Any]:
        """Describes it for /server_info."""
        return asdict(self)

    @classmethod
    def from_json(cls, described: dict[str, Any]) -> ExpertSlotPlan:
        """Returns the plan that `describe` described."""
        return cls(**described)

    def __str__(self) -> str:
        ranks = f" for each of {self.banks} ranks" if self.banks > 1 else ""
        ranks += f", which {self.processes // self.banks} replicas share" if self.processes > self.banks else ""
        cpus = f" with {self.cpu_threads} threads of CPUs" if self.cpu_threads else ""
        return (
            f"experts of {self.layers} layers in main memory: {self.host_bytes / GIB:.2f} GiB{ranks}, {self.slots} of"
            f" {self.experts} in GPU memory at a time; predicted{cpus} {1 / self.decode_one:.0f} tokens/s for one"
            f" request, {8 / self.decode_eight:.0f} for eight, {self.prompt:.1f} s for a prompt of {self.chunk:,}"
            " tokens"
        )


def hit_share(slots: float) -> float:
    """Returns the predicted share of chosen experts that are found in slots. `slots`: their number by the experts'."""
    for (low, at_low), (high, at_high) in pairwise(HIT_SHARES):
        if slots <= high:
            return at_low + (at_high - at_low) * (slots - low) / (high - low)
    return 1.0


def bus_rate(arch: ArchTraits, main_memory: MainMemory, processes: int) -> float:
    """Returns the predicted bytes a second from main memory to a GPU, while all GPUs of the machine read."""
    bus = PCIE5 if arch.capability is None or arch.capability[0] >= 9 else PCIE4
    return min(bus, main_memory.rate / processes) if main_memory.rate else bus
