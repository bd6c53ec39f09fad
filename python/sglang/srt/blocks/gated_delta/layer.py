"""The gated delta net of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.recurrent_state.core import Convolution, Gates, Heads, RecurrentCore
from sglang.srt.blocks.recurrent_state.reference import GATED_RMSNORM
from sglang.srt.blocks.recurrent_state.rule import gated_delta_rule
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear, even_share
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.ranks import ShardRange, exact_share
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

RowPieces = list[tuple[str, ShardRange]]


class GatedDeltaNet(SumsInOutput):
    """The gated delta net, [T, H] -> [T, H]: projections to q, k, v, an output gate z and two gates per head; a causal
    convolution of q, k and v; the gated delta rule; a norm of each head times silu(z) or sigmoid(z); the output
    projection."""

    def __init__(self, scope: Scope, spec: GatedDelta, site: Site) -> None:
        group = scope.groups.attention
        key_heads = even_share(spec.key_heads, group, "number of key heads").run
        value_share = even_share(spec.value_heads, group, "number of value heads")
        value_heads = value_share.run
        rows = _Rows(spec, key_heads, value_heads)
        self.heads = Heads(
            key_heads.stop - key_heads.start, value_heads.stop - value_heads.start, spec.key_dim, spec.value_dim
        )
        self.eps = site.model.norm_eps
        into, gates, out = scope.sub("in"), scope.sub("in_gates"), scope.sub("out")
        self.in_proj = ColumnParallelLinear(into, into.matrix(), rows.input_rows())
        self.gates = ColumnParallelLinear(gates, gates.matrix(), rows.gate_rows())
        self.conv = Convolution(
            _conv_weight(scope.sub("conv"), rows, spec.conv_kernel), None, 2 * self.heads.key_heads, spec.key_dim
        )
        self.a_log = _per_head(scope, "A_log", value_heads, spec.value_heads)
        self.dt_bias = _per_head(scope, "dt_bias", value_heads, spec.value_heads)
        self.norm_weight = scope.sub("norm").param("weight", (spec.value_dim,), init=Init.ONES)
        self.sigmoid_gate = spec.sigmoid_gate
        self.norm = scope.plan.entry(GATED_RMSNORM)
        cache = scope.cache(site.layer_id, "state")
        self.core = RecurrentCore(scope, cache, "gated_delta_rule", gated_delta_rule(spec.key_dim), self.heads)
        self.out = RowParallelLinear(out, value_share.scale_dims(spec.value_dim), out.matrix(), group=group)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        mixed, z = self.in_proj(x).split([self.heads.channels, self.heads.values], dim=-1)
        b, a = self.gates(x).chunk(2, dim=-1)
        out = self.core(mixed, self.conv, Gates(a, b, self.a_log, self.dt_bias), batch)
        return self.out(self.norm(out, z, self.norm_weight, self.eps, sigmoid=self.sigmoid_gate))


class _Rows:
    """The rows of this rank's heads in the checkpoint's projections."""

    def __init__(self, spec: GatedDelta, key_heads: slice, value_heads: slice) -> None:
        self.spec, self.key_heads, self.value_heads = spec, key_heads, value_heads

    def sections(self) -> list[tuple[int, slice]]:
        """Returns (rows of the checkpoint before the section, this rank's rows in it) for q, k and v of
        `channel_rows`."""
        spec = self.spec
        keys = spec.key_heads * spec.key_dim
        own_keys = _scaled(self.key_heads, spec.key_dim)
        return [(0, own_keys), (keys, own_keys), (2 * keys, _scaled(self.value_heads, spec.value_dim))]

    def channel_rows(self) -> list[slice]:
        """Returns the rows of q, k and v, one section after the other."""
        return [slice(before + rows.start, before + rows.stop) for before, rows in self.sections()]

    def input_rows(self) -> RowPieces:
        spec = self.spec
        values = spec.value_heads * spec.value_dim
        if not spec.by_key_head:
            channels = 2 * spec.key_heads * spec.key_dim + values
            pieces: RowPieces = [("qkv", exact_share(channels, rows)) for rows in self.channel_rows()]
            return [*pieces, ("z", exact_share(values, _scaled(self.value_heads, spec.value_dim)))]
        group = spec.value_heads // spec.key_heads * spec.value_dim
        return self._by_key_head("qkvz", [spec.key_dim, spec.key_dim, group, group])

    def gate_rows(self) -> RowPieces:
        """Returns the rows of b of all heads, then of a."""
        spec = self.spec
        if not spec.by_key_head:
            return [(part, exact_share(spec.value_heads, self.value_heads)) for part in ("b", "a")]
        group = spec.value_heads // spec.key_heads
        return self._by_key_head("ba", [group, group])

    def _by_key_head(self, part: str, sizes: list[int]) -> RowPieces:
        """Returns this rank's rows of a projection that stores, per key head, rows of every size in `sizes`: all rows
        of the first size, then all of the second, ..."""
        stride = sum(sizes)
        total, pieces = stride * self.spec.key_heads, []
        for i, size in enumerate(sizes):
            for head in range(self.key_heads.start, self.key_heads.stop):
                begin = head * stride + sum(sizes[:i])
                pieces.append((part, exact_share(total, slice(begin, begin + size))))
        return pieces


def _scaled(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)


def _conv_weight(scope: Scope, rows: _Rows, width: int) -> torch.Tensor:
    """Returns the parameter [channels, width] of a checkpoint's [channels, 1, width]."""
    spec, parts, end = rows.spec, {}, 0
    total = 2 * spec.key_heads * spec.key_dim + spec.value_heads * spec.value_dim
    for piece, source in enumerate(rows.channel_rows()):
        begin, end = end, end + source.stop - source.start
        parts[PartKey(piece=piece)] = TensorPart((total, 1, width), (source,), (slice(begin, end),))
    return scope.param("weight", (end, width), parts)


def _per_head(scope: Scope, leaf: str, heads: slice, total: int) -> torch.Tensor:
    """Returns a parameter [heads of the rank] fp32."""
    part = TensorPart((total,), (heads,))
    return scope.param(leaf, (heads.stop - heads.start,), {PartKey(): part}, Init.ONES, torch.float32)
