"""From how many tokens on a step with prompts runs as two halves, whose sums over ranks travel while the other half
computes: by how the GPUs are connected, how many they are, and what is computed.

Below, a half has too few tokens for the weights that it reads: with experts both halves choose nearly all of them.
Everything is predicted, none of it measured (`explain --time`); a test holds the rows to the predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import PCIE


@dataclass(frozen=True, slots=True)
class HalvesBand:
    """Steps of `least` tokens and more of groups of these sizes, connected in one of these ways, of models with or
    without experts (None: both), whose sums travel in eight bits or not (None: either way). `unasked`: also where no
    flag asks for it."""

    topologies: frozenset[Topology]
    ranks: frozenset[int]
    experts: bool | None
    eight_bits: bool | None
    least: int
    unasked: bool
    reason: str


_UP_TO_8, _TWO, _FOUR, _EIGHT = (frozenset(ranks) for ranks in (range(2, 9), (2,), (3, 4), range(5, 9)))
_SUMS = "predicted: sums take longer than reading the weights once more"
_EXPERTS = "predicted: sums take longer than reading the experts once more"

HALVES: tuple[HalvesBand, ...] = (
    HalvesBand(PCIE, _UP_TO_8, False, None, 1024, True, _SUMS),
    HalvesBand(PCIE, _TWO, True, False, 8192, True, _EXPERTS),
    HalvesBand(PCIE, _TWO, True, True, 8192, False, "predicted: nothing to gain beside eight bits"),
    HalvesBand(PCIE, _FOUR, True, False, 2048, True, _EXPERTS),
    HalvesBand(PCIE, _FOUR, True, True, 8192, True, _EXPERTS),
    HalvesBand(PCIE, _EIGHT, True, False, 2048, True, _EXPERTS),
    HalvesBand(PCIE, _EIGHT, True, True, 4096, True, _EXPERTS),
)  # fmt: skip


def halves_from(topology: Topology | None, ranks: int, experts: bool, eight_bits: bool) -> HalvesBand:
    """The row of a group. topology None: ranks on CPUs, or nobody has looked."""
    for band in HALVES:
        if (
            topology in band.topologies
            and ranks in band.ranks
            and band.experts in (None, experts)
            and band.eight_bits in (None, eight_bits)
        ):
            return band
    if topology is None:
        return HalvesBand(frozenset(), frozenset(), None, None, 2, False, "ranks on CPUs wait for their sums")
    links = "sums over NVLink take little of a step" if topology is Topology.NVLINK else "nothing is predicted"
    return HalvesBand(frozenset(), frozenset(), None, None, 4096, False, links)
