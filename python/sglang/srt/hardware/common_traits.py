"""The traits that GPUs of one architecture have in common, for which one plan serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang.srt.hardware.arch import ArchTraits


def common_traits(traits: Sequence[ArchTraits]) -> ArchTraits:
    """Returns the traits that one plan for all these GPUs, of one architecture, can count on: the least of each number
    and the common features. The product is the one with the fewest SMs, then with the least bandwidth."""
    slowest = min(traits, key=lambda each: (each.num_sms, each.bandwidth, each.memory, each.product or ""))
    return replace(
        slowest,
        smem_per_block=min(each.smem_per_block for each in traits),
        smem_per_sm=min(each.smem_per_sm for each in traits),
        bandwidth=min(each.bandwidth for each in traits),
        memory=min(each.memory for each in traits),
        features=frozenset.intersection(*(each.features for each in traits)),
    )
