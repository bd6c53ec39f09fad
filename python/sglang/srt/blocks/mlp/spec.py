"""Gated MLPs, as a block of `layer_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.configs.activation import SILU, Activation
from sglang.srt.configs.quant_scheme import dense_unit
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import FeedForwardDefaults
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import RankLayout, ShardRange, share_of_units
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    pass


def up_parts(activation: Activation) -> tuple[str, ...]:
    """Returns the parts of an MLP's first product: gate and up, or up alone."""
    return ("gate", "up") if activation.gated else ("up",)


@dataclass(frozen=True, slots=True)
class Dense(FeedForwardDefaults):
    """An MLP.

    scale_group: contiguous intermediate dims that share quantization scales in the checkpoint
    joined: the checkpoint has gate and up as one tensor, gate's rows first
    alternating: gate and up are one 16-bit tensor whose rows alternate between both
    members: > 1: that many MLPs are one three-dimensional tensor and are computed side by side, each of an equal
        part of the intermediate dims
    scaled: a number in the checkpoint multiplies the output
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = SILU
    scale_group: int = 1
    joined: bool = False
    alternating: bool = False
    members: int = 1
    scaled: bool = False

    @property
    def mlp(self) -> Dense:
        return self

    @property
    def defers_all_reduce(self) -> bool:
        return not self.bias

    def with_scale_groups(self, group_of: Callable[[str, Dense], int]) -> Dense:
        return replace(self, scale_group=group_of("mlp", self))

    def share(self, rank: int, tp_size: int) -> ShardRange:
        """Returns the intermediate dims of a rank. Raises UserError where they cannot be divided."""
        unit = dense_unit(self.intermediate_size, tp_size, self.scale_group)
        return share_of_units(self.intermediate_size, unit, rank, tp_size)

    def padded_rows(self, tp_size: int) -> int:
        """Returns the most intermediate dims that a rank has. Raises UserError where they cannot be divided."""
        return self.share(0, tp_size).padded_count

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need(self.activation.op, q_dtype=parallel.dtype)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        return self.matrices("mlp", hidden_size, ranks.tp_size)

    def matrices(self, prefix: str, hidden_size: int, tp_size: int) -> Weights:
        """Returns the weights of a rank, named with `prefix`: gate (where there is one) and up stacked, and down."""
        parts, rows, quantized = up_parts(self.activation), self.padded_rows(tp_size), not self.alternating
        return (
            Matrix(
                f"{prefix}.gate_up",
                parts,
                len(parts) * rows,
                hidden_size,
                self.bias,
                quantized=quantized,
                adapted=quantized,
            ),
            Matrix(f"{prefix}.down", ("down",), hidden_size, rows, self.bias, quantized=quantized, adapted=quantized),
            Elements(int(self.scaled), "float32"),
        )

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int:
        return 3 * self.padded_rows(ranks.tp_size)
