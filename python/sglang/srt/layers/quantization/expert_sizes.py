"""What a rank holds of a layer's experts: how many of them, and which rows and columns of their matrices."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.parameter import WeightShard
from sglang.srt.layers.quantization.stored import length
from sglang.srt.plan.layer_spec import Matrix
from sglang.srt.plan.ranks import even_slice


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`w13` and `w2`: what this rank has room for; the rest is of the whole layer. `shared`: one more expert behind the
    routed ones, read from the layer's shared expert. `form` names how a 16-bit checkpoint keeps the experts: "" one by
    one, or one of `experts_fused.FUSED`. The routed experts are cut into `ep_size` runs, of which this rank has number
    `ep_rank`."""

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
        """The routed experts of this rank."""
        return even_slice(self.num_experts, self.ep_rank, self.ep_size)

    @property
    def num_local(self) -> int:
        return length(self.local)

    @property
    def bias(self) -> bool:
        return self.w13.bias

    @property
    def padded_experts(self) -> int:
        """Experts in each tensor, which are as many on every rank."""
        return self.w13.experts


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of the two products. `shards` are what this rank holds of each expert's matrices; matrix i begins at row
    `at[i]` of `rows`; `cols` are as many as there is room for."""

    name: str
    shards: tuple[WeightShard, ...]
    at: tuple[int, ...]
    rows: int
    cols: int

    @property
    def padded(self) -> bool:
        return sum(s.rows.count for s in self.shards) < self.rows or self.shards[0].cols.count < self.cols
