"""Linear layers over the tensor-parallel ranks.

A layer states its shards (the rows or columns of checkpoint tensors that this rank holds); the scope's QuantMethod
creates the tensors and multiplies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.layers.adapters import AdapterLinear, ModuleRows
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Apply, Init, Scope, TensorPart, WeightShard, zeroed_behind
from sglang.srt.layers.quantization.activations import Activations, RowFormat, values_of
from sglang.srt.plan.ranks import ShardRange, padded_share, whole
from sglang.srt.plan.weight_names import PartKey
from sglang.srt.plan.weight_spec import Matrix


class Unquantized:
    """One weight [out, in] in the model's dtype. Implements QuantMethod."""

    def create_weights(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        weight = self.stacked(scope, shards)
        linear = scope.plan.entry(LINEAR)
        return lambda x: linear(values_of(x), weight, bias)

    def create_dequantized(self, scope: Scope, shards: list[WeightShard], bias: torch.Tensor | None) -> Apply:
        return self.create_weights(scope, shards, bias)

    def create_head(self, scope: Scope, shard: WeightShard) -> Apply | None:
        return None

    def create_unpacked(self, scope: Scope, shard: WeightShard, take: Callable[[torch.Tensor], None]) -> None:
        take(self.stacked(scope, [shard]))

    def stacked(self, scope: Scope, shards: list[WeightShard]) -> torch.Tensor:
        """Allocates one parameter with the shards stacked by rows."""
        parts: dict[PartKey, TensorPart] = {}
        begin, cols = 0, shards[0].cols
        for shard in shards:
            dest = (slice(begin, begin + shard.rows.count), slice(0, cols.count))
            parts[shard.key] = TensorPart((shard.rows.total, cols.total), (shard.rows.run, cols.run), dest)
            begin += shard.rows.padded_count
        return zeroed_behind(shards, scope.param("weight", (begin, cols.padded_count), parts))


def even_share(total: int, group: Group, what: str) -> ShardRange:
    """Returns this rank's share of equal shares. Raises ValueError if `total` cannot be divided."""
    if total % group.size:
        raise ValueError(
            f"{what} {total} cannot be divided over {group.size} tensor-parallel ranks; choose another --tp-size"
        )
    return padded_share(total, total // group.size, group.rank)


class ColumnParallelLinear:
    """Several projections of one input, side by side, each sharded by output: x [T, in] -> [T, sum of shares].

    `weights`: their description, or for attention the number of input features, with `bias`. `projections` maps a
    checkpoint part to this rank's share of its output features; it is a list of pairs if a part has several separate
    slices. `dequantized`: the weight is held in the model's dtype even if the checkpoint quantizes it; a Matrix states
    this itself.
    """

    def __init__(
        self,
        scope: Scope,
        weights: Matrix | int,
        projections: Mapping[str, ShardRange] | Sequence[tuple[str, ShardRange]],
        bias: bool = False,
        dequantized: bool = False,
    ) -> None:
        pieces, shards = Counter[str](), list[WeightShard]()
        if isinstance(weights, Matrix):
            in_features, bias, dequantized = weights.cols, weights.bias, not weights.quantized
        else:
            in_features = weights
        for part, rows in projections.items() if isinstance(projections, Mapping) else projections:
            shards.append(WeightShard(part, rows, whole(in_features), pieces[part]))
            pieces[part] += 1
        if isinstance(weights, Matrix):
            _check(scope, weights, sum(shard.rows.padded_count for shard in shards), in_features)
        create = scope.quant.create_dequantized if dequantized else scope.quant.create_weights
        self.apply = create(scope, shards, _stacked_bias(scope, shards) if bias else None)
        self.adapters = _adapters(scope, shards, self.apply)
        self.row_format: RowFormat | None = getattr(self.apply, "row_format", None)

    def __call__(self, x: Activations) -> torch.Tensor:
        if self.adapters is None:
            return self.apply(x)
        return self.adapters.added(lambda: self.apply(x), values_of(x))


class RowParallelLinear:
    """A projection sharded by input over `group` (all ranks if None) and summed over it: x [T, padded `cols`] -> [T,
    out]. `weights`: as in ColumnParallelLinear, or output features. Without `reduce` the caller sums, and there is no
    bias."""

    def __init__(
        self,
        scope: Scope,
        cols: ShardRange,
        weights: Matrix | int,
        bias: bool = False,
        reduce: bool = True,
        group: Group | None = None,
    ) -> None:
        dequantized = False
        if isinstance(weights, Matrix):
            out_features, bias, dequantized = weights.rows, weights.bias, not weights.quantized
            _check(scope, weights, out_features, cols.padded_count)
        else:
            out_features = weights
        assert reduce or not bias
        self.group = group or scope.groups.tp
        shard = WeightShard("", whole(out_features), cols)
        self.bias = scope.param("bias", (out_features,), init=Init.ZEROS) if bias else None
        self.multi_rank = self.group.size > 1 and reduce
        # The bias belongs to the sum, so that with several ranks it is added once, after the all-reduce.
        create = scope.quant.create_dequantized if dequantized else scope.quant.create_weights
        self.apply = create(scope, [shard], None if self.multi_rank else self.bias)
        self.adapters = _adapters(scope, [shard], self.apply, self.group)

    def defer_all_reduce(self) -> Group | None:
        """Makes the layer return partial sums from now on; returns the group to sum over. Returns None if there is
        nothing to defer, or a bias must be added to the sum."""
        if not self.multi_rank or self.bias is not None:
            return None
        self.multi_rank = False
        return self.group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapters is None:
            out = self.apply(x)
        else:  # of this rank's columns of A, before the sum over the ranks
            out = self.adapters.added(lambda: self.apply(x), values_of(x))
        if not self.multi_rank:
            return out
        out = self.group.all_reduce(out)
        return out if self.bias is None else out + self.bias


class ReplicatedLinear:
    """A projection that every rank holds and computes completely: x [T, in] -> [T, out]."""

    def __init__(self, scope: Scope) -> None:
        weights = scope.matrix()
        shards = [WeightShard("", whole(weights.rows), whole(weights.cols))]
        bias = _stacked_bias(scope, shards) if weights.bias else None
        create = scope.quant.create_weights if weights.quantized else scope.quant.create_dequantized
        self.apply = create(scope, shards, bias)
        self.adapters = _adapters(scope, shards, self.apply)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapters is None:
            return self.apply(x)
        return self.adapters.added(lambda: self.apply(x), values_of(x))


class GatheredLinear:
    """A projection sharded by output over `group` and gathered, so that every rank has all of what it computes: x [T,
    in] -> [T, out]. `rows`: this rank's share, as long as that of each other rank, or all output features, which are
    then computed without a collective."""

    def __init__(self, scope: Scope, rows: ShardRange, group: Group) -> None:
        self.part = ColumnParallelLinear(scope, scope.matrix(), {"": rows})
        self.group = group if rows.count < rows.total else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.part(x)
        return out if self.group is None else self.group.all_gather(out)


def _adapters(
    scope: Scope, shards: Sequence[WeightShard], apply: Apply, group: Group | None = None
) -> AdapterLinear | None:
    """Returns memory for the adapters of a linear layer that `apply` computes; None for one that has none. group: the
    ranks that divide its columns."""
    if scope.adapters is None or not scope.path.startswith("layers."):
        return None
    rows = [ModuleRows(scope.module(shard.part), shard.part, shard.rows, shard.cols) for shard in shards]
    return scope.adapters.linear(rows, apply, group)


def _check(scope: Scope, weights: Matrix, rows: int, cols: int) -> None:
    shape = weights.rows, weights.cols
    assert (rows, cols) == shape, f"{scope.path}: this rank's shares are {(rows, cols)}, its description says {shape}"


def _stacked_bias(scope: Scope, shards: list[WeightShard]) -> torch.Tensor:
    parts: dict[PartKey, TensorPart] = {}
    begin = 0
    for shard in shards:
        rows = shard.rows
        parts[shard.key] = TensorPart((rows.total,), (rows.run,), (slice(begin, begin + rows.count),))
        begin += rows.padded_count
    return zeroed_behind(shards, scope.param("bias", (begin,), parts, init=Init.ZEROS))
