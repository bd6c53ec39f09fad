"""Gated feed-forward blocks whose checkpoint interleaves the rows of gate and up in one tensor (Inkling): one MLP, or
several members side by side, whose outputs are weighted and summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mlp.layer import gate_of
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.distributed.groups import Group
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Convert, Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.plan.ranks import ShardRange
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class AlternatingMLP:
    """A gated feed-forward block, [T, H] -> [T, H]. Without `reduce` it returns this rank's partial sums."""

    def __init__(self, scope: Scope, spec: Dense, reduce: bool = True) -> None:
        self.group = scope.groups.tp
        self.reduce = reduce and self.group.size > 1
        share = spec.share(self.group.rank, self.group.size)
        self.up, self.down, self.member_of = _weights(scope, spec, share)
        self.linear = scope.plan.entry(LINEAR)
        self.activation = gate_of(scope, spec.activation)
        self.factor = 1.0
        if spec.scaled:
            self.scale = scope.param("global_scale", (1,), init=Init.ONES, dtype=torch.float32)
            scope.finish.append(self._read_factor)

    def _read_factor(self) -> None:
        self.factor = float(self.scale)

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return partial sums from now on; returns the group to sum over, None if nothing is to be
        summed."""
        if not self.reduce:
            return None
        self.reduce = False
        return self.group

    def __call__(
        self, x: Activations, batch: ForwardBatch | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the block. weights [T, members] fp32: factors of the members' outputs; None: 1."""
        inner = self.activation(self.linear(values_of(x), self.up, None, None))
        if weights is not None:
            inner = (inner * weights[:, self.member_of]).to(inner.dtype)
        out = self.linear(inner, self.down, None, None)
        if self.factor != 1.0:
            out = out * self.factor
        return self.group.all_reduce(out) if self.reduce else out


def _weights(scope: Scope, spec: Dense, share: ShardRange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a rank's weights, gate above up [2 * room, H] and down [H, room], and each intermediate dim's member
    [room]."""
    gate_up, down = scope.sub("gate_up"), scope.sub("down")
    hidden, room, size = gate_up.matrix().cols, share.padded_count, spec.intermediate_size // spec.members
    up_parts, down_parts = dict[PartKey, TensorPart](), dict[PartKey, TensorPart]()
    stacked = (spec.members,) if spec.members > 1 else ()
    for member in range(spec.members):
        first, stop = max(share.run.start, member * size), min(share.run.stop, (member + 1) * size)
        if first >= stop:
            continue
        at, dims = first - share.run.start, slice(first - member * size, stop - member * size)
        place = (slice(member, member + 1),) if stacked else ()
        columns = slice(at, at + stop - first)
        for row, part in enumerate(("gate", "up")):
            up_parts[PartKey(part, piece=member)] = TensorPart(
                (*stacked, 2 * size, hidden),
                (*place, slice(2 * dims.start, 2 * dims.stop)),
                (slice(row * room + columns.start, row * room + columns.stop),),
                convert=_every_second(row, hidden),
            )
        down_parts[PartKey(piece=member)] = TensorPart(
            (*stacked, hidden, size),
            (*place, slice(0, hidden), dims),
            (slice(0, hidden), columns),
            convert=lambda stored: stored.flatten(0, -2),
        )
    up_weight = gate_up.param("weight", (2 * room, hidden), up_parts)
    down_weight = down.param("weight", (hidden, room), down_parts)
    for weight in (up_weight, down_weight):
        if share.padded and not weight.is_meta:
            weight.zero_()
    dims_of_rank = torch.arange(room, device=scope.device) + share.run.start
    return up_weight, down_weight, (dims_of_rank // size).clamp(max=spec.members - 1)


def _every_second(first: int, columns: int) -> Convert:
    """Returns a conversion of [.., rows, columns] to its rows first, first + 2, ..."""
    return lambda stored: stored.reshape(-1, columns)[first::2]
