"""Table of thresholds for two-batch overlap: from how many tokens on a step with prompts runs as two microbatches,
whose all-reduces overlap with the other microbatch's computation. It depends on how the GPUs are linked, how many they
are, and what is computed.

Below the threshold a microbatch has too few tokens for the weights that it reads (with experts, both microbatches
choose nearly all of them), or for the host, which launches everything twice. Everything is predicted (`explain
--time`), with the host times that were measured; a test holds the rows to the predictions. Rows are for microbatches
that alternate block by block in one thread; in two threads they need twice the tokens (`plan.two_batch_overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.hardware.topology import Topology
from sglang.srt.kernels.all_reduce_table import PCIE


@dataclass(frozen=True, slots=True)
class TwoBatchThreshold:
    """A row of the table: steps of at least `least` tokens run as two microbatches.

    topologies, ranks: links and sizes of the groups of ranks for which it counts
    experts, eight_bits: models with or without experts, with or without quantized all-reduces; None: both
    unasked: without a flag that asks for it, too
    """

    topologies: frozenset[Topology]
    ranks: frozenset[int]
    experts: bool | None
    eight_bits: bool | None
    least: int
    unasked: bool
    reason: str
    exact: bool = False
    """All-reduces of microbatches are not quantized, whatever the flag says for other steps: they overlap as well as
    quantized ones, which the host takes longer to launch."""


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
"""With two ranks, microbatches keep all-reduces exact: on H100s whose all-reduces pass through main memory, a prompt of
8,192 tokens took 118 ms this way, 131 with quantized all-reduces too, 153 with these alone and 177 with neither."""


def two_batch_threshold(topology: Topology | None, ranks: int, experts: bool, eight_bits: bool) -> TwoBatchThreshold:
    """Returns the row of a group. `topology` None: ranks on CPUs, or links that were not probed."""
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
