"""The part of a layer's experts that a rank holds: how many experts, and which rows and columns of their matrices."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.parameter import WeightShard
from sglang.srt.layers.quantization.stored import length
from sglang.srt.plan.ranks import even_slice
from sglang.srt.plan.weight_spec import Matrix


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`w13` and `w2`: sizes of this rank's tensors; all other numbers are of the whole layer. `shared`: the shared
    expert is stored as one more expert after the routed ones. `form`: how a 16-bit checkpoint stores experts: "" one by
    one, or one of `experts_fused.FUSED`. `ep_rank`, `ep_size`: expert parallelism over runs of the routed experts."""

    w13: Matrix
    w2: Matrix
    num_experts: int
    intermediate_size: int
    shared: bool = False
    form: str = ""
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        assert not (self.shared and self.ep_size > 1), "all ranks share the shared expert"

    @property
    def local(self) -> slice:
        """Returns the slice of routed experts on this rank."""
        return even_slice(self.num_experts, self.ep_rank, self.ep_size)

    @property
    def num_local(self) -> int:
        """Returns the number of routed experts on this rank."""
        return length(self.local)

    @property
    def bias(self) -> bool:
        """Returns whether the experts have biases."""
        return self.w13.bias

    @property
    def padded_experts(self) -> int:
        """Returns the number of experts in each tensor, which is equal on all ranks."""
        return self.w13.experts


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of the two products. `shards`: this rank's parts of each expert's matrices; matrix i begins at row `at[i]` of
    `rows`; `cols`: columns including padding."""

    name: str
    shards: tuple[WeightShard, ...]
    at: tuple[int, ...]
    rows: int
    cols: int

    @property
    def padded(self) -> bool:
        """Returns whether the tensors have more rows or columns than this rank's shards."""
        return sum(s.rows.count for s in self.shards) < self.rows or self.shards[0].cols.count < self.cols
