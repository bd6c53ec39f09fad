"""Kimi delta attention (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.recurrent_state.core import Convolution, Gates, Heads, RecurrentCore
from sglang.srt.blocks.recurrent_state.reference import GATED_RMSNORM
from sglang.srt.blocks.recurrent_state.rule import kimi_delta_rule
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear, even_share
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.ranks import ShardRange, whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

QKV = ("q", "k", "v")


class KimiDeltaAttention(SumsInOutput):
    """Kimi delta attention, [T, H] -> [T, H]: projections to q, k and v; a causal convolution of each; the gated delta
    rule with a decay per key channel; a norm of each head times a sigmoid gate; the output projection."""

    def __init__(self, scope: Scope, spec: KimiDelta, site: Site) -> None:
        group = scope.groups.attention
        shares = even_share(spec.num_heads, group, "number of heads of Kimi delta attention")
        rows = shares.scale_dims(spec.head_dim)
        self.spec, self.num_heads, self.eps = spec, shares.count, site.model.norm_eps
        self.heads = Heads(self.num_heads, self.num_heads, spec.head_dim, spec.head_dim)
        self.in_proj = _columns(scope.sub("in"), dict.fromkeys(QKV, rows))
        self.beta = _columns(scope.sub("beta"), {"b": shares})
        self.decays_and_gates = (FullRank if spec.full_rank else LowRank)(scope, spec, rows)
        weight = _conv_weight(scope.sub("conv"), rows, spec.conv_kernel)
        self.conv = Convolution(weight, None, 2 * self.num_heads, spec.head_dim)
        self.a_log = _a_log(scope, shares)
        bias = TensorPart((rows.total,), (rows.run,))
        dt_bias = scope.param("dt_bias", (rows.count,), {PartKey(): bias}, Init.ONES, torch.float32)
        self.dt_bias = dt_bias.unflatten(0, (self.num_heads, spec.head_dim))
        self.norm_weight = scope.sub("norm").param("weight", (spec.head_dim,), init=Init.ONES)
        self.norm = scope.plan.entry(GATED_RMSNORM)
        rule = kimi_delta_rule(spec.head_dim, spec.lower_bound)
        self.core = RecurrentCore(scope, scope.cache(site.layer_id, "state"), "kimi_delta_rule", rule, self.heads)
        out = scope.sub("out")
        self.out = RowParallelLinear(out, rows, out.matrix(), group=group)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        decays, gate = self.decays_and_gates(x)
        decays = decays.unflatten(-1, (self.num_heads, self.spec.head_dim))
        gates = Gates(decays, self.beta(x), self.a_log, self.dt_bias)
        out = self.core(self.in_proj(x), self.conv, gates, batch)
        return self.out(self.norm(out, gate, self.norm_weight, self.eps, sigmoid=True))


class LowRank:
    """Low-rank projections to decays and gates, the first of which every rank computes completely."""

    def __init__(self, scope: Scope, spec: KimiDelta, rows: ShardRange) -> None:
        rank = whole(spec.head_dim)
        self.low = _columns(scope.sub("low"), {"f_a": rank, "g_a": rank})
        self.decay, self.gate = (
            _columns(scope.sub(name), {part: rows}) for name, part in (("decay", "f_b"), ("gate", "g_b"))
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_decay, of_gate = self.low(x).chunk(2, dim=-1)
        return self.decay(of_decay.contiguous()), self.gate(of_gate.contiguous())


class FullRank:
    """One projection to decays and gates."""

    def __init__(self, scope: Scope, spec: KimiDelta, rows: ShardRange) -> None:
        self.both = _columns(scope.sub("decay_gate"), {"f": rows, "g": rows})

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, gate = self.both(x).chunk(2, dim=-1)
        return decay.contiguous(), gate.contiguous()


def _columns(scope: Scope, projections: dict[str, ShardRange]) -> ColumnParallelLinear:
    return ColumnParallelLinear(scope, scope.matrix(), projections)


def _conv_weight(scope: Scope, rows: ShardRange, width: int) -> torch.Tensor:
    """Returns the parameter [channels of q, k and v, width] of a checkpoint's [channels, 1, width] each."""
    parts = {
        PartKey(part): TensorPart((rows.total, 1, width), (rows.run,), (slice(i * rows.count, (i + 1) * rows.count),))
        for i, part in enumerate(QKV)
    }
    return scope.param("weight", (len(QKV) * rows.count, width), parts)


def _a_log(scope: Scope, heads: ShardRange) -> torch.Tensor:
    """Returns the parameter [heads of the rank] fp32 of a checkpoint's [1, 1, heads, 1] or [heads]."""
    every = slice(None)
    part = TensorPart((1, 1, heads.total, 1), (every, every, heads.run), other=TensorPart((heads.total,), (heads.run,)))
    return scope.param("A_log", (heads.count,), {PartKey(): part}, Init.ONES, torch.float32)
