"""From how many tokens on a step with prompts runs as two microbatches, whose sums over ranks travel while the other
microbatch computes: by how the GPUs are connected, how many they are, and what is computed.

Below, a microbatch has too few tokens for the weights that it reads, as with experts both microbatches choose nearly
all of them, or for the host, which launches everything twice. Everything is predicted (`explain --time`), with what the
host was measured to take; a test holds the rows to the predictions. Rows are for microbatches that alternate block by
block in one thread; as threads they need twice the tokens (`plan.microbatches`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import PCIE


@dataclass(frozen=True, slots=True)
class TwoBatchThreshold:
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
    exact: bool = False
    """Sums of microbatches travel as they are, whatever the flag says for other steps: they hide as well as those in
    eight bits, which the host takes longer to launch."""


_TWO, _MORE = frozenset({2}), frozenset(range(3, 9))
_UP_TO_FOUR, _UP_TO_EIGHT = frozenset({3, 4}), frozenset(range(5, 9))
_SUMS = "predicted: sums take longer than reading the weights once more, and the host keeps up"
_EXPERTS = "predicted: sums take longer than reading the experts once more"
_NOTHING = "predicted: nothing to gain beside eight bits"

TWO_BATCH_THRESHOLDS: tuple[TwoBatchThreshold, ...] = (
    TwoBatchThreshold(PCIE, _TWO, False, None, 2048, True, _SUMS, exact=True),
    TwoBatchThreshold(PCIE, _MORE, False, None, 2048, True, _SUMS),
    TwoBatchThreshold(PCIE, _TWO, True, False, 8192, True, _EXPERTS, exact=True),
    TwoBatchThreshold(PCIE, _TWO, True, True, 8192, False, _NOTHING, exact=True),
    TwoBatchThreshold(PCIE, _UP_TO_FOUR, True, False, 2048, True, _EXPERTS),
    TwoBatchThreshold(PCIE, _UP_TO_FOUR, True, True, 4096, True, _EXPERTS),
    TwoBatchThreshold(PCIE, _UP_TO_EIGHT, True, None, 2048, True, _EXPERTS),
)  # fmt: skip
"""Of two ranks microbatches keep sums exact: on H100s whose sums pass through main memory, a prompt of 8,192 tokens
took 118 ms so, 131 with both, 153 in eight bits alone and 177 with neither."""


def two_batch_threshold(topology: Topology | None, ranks: int, experts: bool, eight_bits: bool) -> TwoBatchThreshold:
    """The row of a group. topology None: ranks on CPUs, or nobody has looked."""
    for row in TWO_BATCH_THRESHOLDS:
        if (
            topology in row.topologies
            and ranks in row.ranks
            and row.experts in (None, experts)
            and row.eight_bits in (None, eight_bits)
        ):
            return row
    if topology is None:
        return TwoBatchThreshold(frozenset(), frozenset(), None, None, 2, False, "ranks on CPUs wait for their sums")
    links = "sums over NVLink take little of a step" if topology is Topology.NVLINK else "nothing is predicted"
    return TwoBatchThreshold(frozenset(), frozenset(), None, None, 4096, False, links, exact=True)
