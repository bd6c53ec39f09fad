"""Linear layers over the tensor-parallel ranks.

A layer states its shards (which rows or columns of which checkpoint tensors this rank holds); the scope's QuantMethod
creates the tensors that hold them and multiplies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.layers.ops import LinearOp
from sglang.srt.layers.parameter import Apply, Init, Part, Scope, Shard
from sglang.srt.layers.quantization.quantized_rows import RowForm, Rows, values_of
from sglang.srt.plan.weight_names import PartKey


class Unquantized:
    """One weight [out, in] in the model's dtype."""

    def create_weights(self, scope: Scope, shards: list[Shard], bias: torch.Tensor | None) -> Apply:
        weight = self._stacked(scope, shards)
        linear: LinearOp = scope.plan.entry("linear")
        return lambda x: linear(values_of(x), weight, bias)

    def create_head(self, scope: Scope, shard: Shard) -> Apply | None:
        return None

    def create_unpacked(self, scope: Scope, shard: Shard, take: Callable[[torch.Tensor], None]) -> None:
        take(self._stacked(scope, [shard]))

    def _stacked(self, scope: Scope, shards: list[Shard]) -> torch.Tensor:
        parts: dict[PartKey, Part] = {}
        end = 0
        for shard in shards:
            begin, end = end, end + shard.rows.stop - shard.rows.start
            parts[shard.key] = Part(
                (shard.out_features, shard.in_features), (shard.rows, shard.cols), (slice(begin, end),)
            )
        return scope.param("weight", (end, shards[0].cols.stop - shards[0].cols.start), parts)


def shard_of(total: int, group: Group, what: str) -> slice:
    """This rank's equal share of `total`."""
    if total % group.size:
        raise ValueError(
            f"{what} {total} cannot be divided over {group.size} tensor-parallel ranks; choose another --tp-size"
        )
    share = total // group.size
    return slice(group.rank * share, (group.rank + 1) * share)


class ColumnParallelLinear:
    """Several projections of one input, side by side, each sharded by output: x [T, in] -> [T, sum of shares].

    `projections` maps the checkpoint's part to (its output features, the rows that this rank holds). Where several
    slices of one part lie apart it is a list of (part, output features, rows).
    """

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        projections: Mapping[str, tuple[int, slice]] | Sequence[tuple[str, int, slice]],
        bias: bool = False,
    ) -> None:
        if isinstance(projections, Mapping):
            projections = [(part, out, rows) for part, (out, rows) in projections.items()]
        whole, pieces = slice(0, in_features), Counter[str]()
        shards = []
        for part, out, rows in projections:
            shards.append(Shard(part, out, in_features, rows, whole, pieces[part]))
            pieces[part] += 1
        self.apply = scope.quant.create_weights(scope, shards, _stacked_bias(scope, shards) if bias else None)
        self.row_form: RowForm | None = getattr(self.apply, "row_form", None)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.apply(x)


class RowParallelLinear:
    """Sharded by input over `group` (all ranks if None), summed over it: x [T, in / size] -> [T, out]. Without `reduce`
    the caller sums, and there is no bias."""

    def __init__(
        self,
        scope: Scope,
        in_features: int,
        out_features: int,
        bias: bool = False,
        reduce: bool = True,
        group: Group | None = None,
    ) -> None:
        assert reduce or not bias
        self.group = group or scope.groups.tp
        cols = shard_of(in_features, self.group, f"input features of {scope.path}:")
        shard = Shard("", out_features, in_features, slice(0, out_features), cols)
        self.bias = scope.param("bias", (out_features,), init=Init.ZEROS) if bias else None
        self.multi_rank = self.group.size > 1 and reduce
        # The bias belongs to the sum, so that with several ranks it is added once, after the all-reduce.
        self.apply = scope.quant.create_weights(scope, [shard], None if self.multi_rank else self.bias)

    def leave_sum(self) -> Group | None:
        """From now on give this rank's summand; returns the group to sum over. None: there is nothing to leave, or a
        bias belongs to the sum."""
        if not self.multi_rank or self.bias is not None:
            return None
        self.multi_rank = False
        return self.group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.apply(x)
        if not self.multi_rank:
            return out
        out = self.group.all_reduce(out)
        return out if self.bias is None else out + self.bias


class ReplicatedLinear:
    """Every rank holds and computes all of it: x [T, in] -> [T, out]."""

    def __init__(self, scope: Scope, in_features: int, out_features: int, bias: bool = False) -> None:
        shards = [Shard("", out_features, in_features, slice(0, out_features), slice(0, in_features))]
        self.apply = scope.quant.create_weights(scope, shards, _stacked_bias(scope, shards) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)


def _stacked_bias(scope: Scope, shards: list[Shard]) -> torch.Tensor:
    parts: dict[PartKey, Part] = {}
    end = 0
    for shard in shards:
        begin, end = end, end + shard.rows.stop - shard.rows.start
        parts[shard.key] = Part((shard.out_features,), (shard.rows,), (slice(begin, end),))
    return scope.param("bias", (end,), parts, init=Init.ZEROS)
