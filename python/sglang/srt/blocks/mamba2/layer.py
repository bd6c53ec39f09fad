"""The Mamba-2 mixer (arXiv 2405.21060), as Nemotron-H has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.recurrent_state.core import Convolution, Gates, Heads, RecurrentCore
from sglang.srt.blocks.recurrent_state.reference import GATED_RMSNORM
from sglang.srt.blocks.recurrent_state.rule import Rule
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear, even_share
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.ranks import exact_share
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class Mamba2Mixer(SumsInOutput):
    """The Mamba-2 mixer, [T, H] -> [T, H]: one projection to the gate, x, B, C and a time step per head; a causal
    convolution of x, B and C; the recurrence with queries C, keys B and values x; a norm of groups of channels after
    the gate; the output projection."""

    def __init__(self, scope: Scope, spec: Mamba2, site: Site) -> None:
        values, into, out = spec.num_heads * spec.head_dim, scope.sub("in"), scope.sub("out")
        head_share = even_share(spec.num_heads, scope.groups.attention, "number of Mamba-2 heads")
        heads = head_share.run
        groups = even_share(spec.num_groups, scope.groups.attention, "number of Mamba-2 groups").run
        num_heads, self.num_groups = heads.stop - heads.start, groups.stop - groups.start
        self.heads = Heads(self.num_groups, num_heads, spec.state_dim, spec.head_dim, values_first=True)
        self.eps = site.model.norm_eps
        channels = _channel_rows(spec, heads, groups)
        total = 2 * values + 2 * spec.num_groups * spec.state_dim + spec.num_heads
        inner = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        rows = [inner, *(_moved(part, values) for part in channels), _moved(heads, total - spec.num_heads)]
        self.in_proj = ColumnParallelLinear(into, into.matrix(), [("", exact_share(total, part)) for part in rows])
        self.sizes = [self.heads.values, self.heads.channels, num_heads]
        self.conv = _convolution(scope.sub("conv"), spec, channels)
        self.a_log, self.dt_bias, self.skip = (
            _sliced(scope, leaf, spec.num_heads, heads, torch.float32) for leaf in ("A_log", "dt_bias", "D")
        )
        self.norm_weight = _sliced(scope.sub("norm"), "weight", values, inner, None)
        self.norm = scope.plan.entry(GATED_RMSNORM)
        rule = Rule(delta=False, dt_min=spec.dt_min, dt_max=spec.dt_max)
        self.core = RecurrentCore(scope, scope.cache(site.layer_id, "state"), "state_space_duality", rule, self.heads)
        inputs = head_share.scale_dims(spec.head_dim)
        self.out = RowParallelLinear(out, inputs, out.matrix(), group=scope.groups.attention)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        gate, mixed, step = self.in_proj(x).split(self.sizes, dim=-1)
        out = self.core(mixed, self.conv, Gates(step, None, self.a_log, self.dt_bias, self.skip), batch)
        by_group = out.view(len(x), self.num_groups, -1)
        return self.out(self.norm(by_group, gate, self.norm_weight, self.eps, gate_first=True))


def _channel_rows(spec: Mamba2, heads: slice, groups: slice) -> list[slice]:
    """Returns this rank's x, B and C among the channels of the convolution."""
    values, keys = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_dim
    states = slice(groups.start * spec.state_dim, groups.stop * spec.state_dim)
    x = slice(heads.start * spec.head_dim, heads.stop * spec.head_dim)
    return [x, _moved(states, values), _moved(states, values + keys)]


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


def _convolution(scope: Scope, spec: Mamba2, rows: list[slice]) -> Convolution:
    total = spec.num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_dim
    weights, biases, end = {}, {}, 0
    for piece, source in enumerate(rows):
        begin, end = end, end + source.stop - source.start
        dest = (slice(begin, end),)
        weights[PartKey(piece=piece)] = TensorPart((total, 1, spec.conv_kernel), (source,), dest)
        biases[PartKey(piece=piece)] = TensorPart((total,), (source,), dest)
    weight = scope.param("weight", (end, spec.conv_kernel), weights)
    return Convolution(weight, scope.param("bias", (end,), biases, Init.ZEROS) if spec.conv_bias else None)


def _sliced(scope: Scope, leaf: str, total: int, rows: slice, dtype: torch.dtype | None) -> torch.Tensor:
    part = TensorPart((total,), (rows,))
    return scope.param(leaf, (rows.stop - rows.start,), {PartKey(): part}, Init.ONES, dtype)
