"""What the blocks of decoder layers are built with, and how they leave their sums over ranks to the next norm."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.plan.model_description import ModelDescription


@dataclass(frozen=True, slots=True)
class Site:
    """The layer number, the model's description and its RoPE tables."""

    layer_id: int
    model: ModelDescription
    rotary: RotaryTables


class SumsInOutput:
    """A block whose last layer, `out`, sums over ranks."""

    out: RowParallelLinear

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return partial sums from now on; returns the group to sum over, None if nothing is to be
        summed."""
        return self.out.defer_all_reduce()


class DefersNoSum:
    """A block whose output is complete: every rank computes all of it, or what follows in the block needs the sum."""

    def defer_all_reduce(self) -> None:
        """Returns None."""
