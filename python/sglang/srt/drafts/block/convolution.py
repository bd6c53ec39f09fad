"""Convolutions over the rows of a draft's blocks, before and after a layer's attention or MLP; see
`drafts.block.spec.Convolution`.

    out[i, c] = sum over taps t of (base[t, c] + kernels[i, t, c // group]) x[i - t, c]    rows before the block are 0

`kernels` are computed from the input row, for both convolutions. The second convolution is linear in the output, so
ranks may convolve their partial sums before the all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from sglang.srt.distributed.groups import Group
from sglang.srt.drafts.block.spec import Convolution
from sglang.srt.layers.linear import Unquantized
from sglang.srt.layers.parameter import Scope, WeightShard
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.plan.ranks import whole

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class ConvolvedBlock:
    """A layer's block between two convolutions, x [R * B, H] of R requests. Implements residual.Block."""

    row_format = None

    def __init__(self, scope: Scope, spec: Convolution, block: Any, hidden_size: int, rows: int) -> None:
        """block: a residual.Block; for attention one with `keep`. rows: B, rows of a request's block."""
        self.block, self.spec, self.rows = block, spec, rows
        self.base = scope.param("base_kernel", (2, spec.taps, hidden_size))
        shard = WeightShard("", whole(spec.rows(hidden_size)), whole(hidden_size))
        self.projection = Unquantized().create_weights(scope.sub("kernel_projection"), [shard], None)

    def defer_all_reduce(self) -> Group | None:
        """Makes the inner block return partial sums from now on; returns the group to sum over, or None."""
        return self.block.defer_all_reduce()

    def keep(self, x: Activations, batch: ForwardBatch) -> None:
        """Stores keys and values of accepted tokens, which are not convolved."""
        self.block.keep(x, batch)

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        values = values_of(x)
        kernels = self.projection(values).view(-1, self.rows, 2, self.spec.taps, values.shape[-1] // self.spec.group)
        out = self.block(self._convolved(values, kernels[:, :, 0], self.base[0]), batch)
        return self._convolved(out, kernels[:, :, 1], self.base[1])

    def _convolved(self, x: torch.Tensor, kernels: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Returns the convolution [R * B, H] of x [R * B, H] with kernels [R, B, taps, groups] and base [taps, H],
        summed in fp32."""
        rows = x.view(-1, self.rows, x.shape[-1] // self.spec.group, self.spec.group).float()
        total = torch.zeros_like(rows)
        for tap in range(min(self.spec.taps, self.rows)):
            weight = base[tap].view(-1, self.spec.group) + kernels[:, :, tap, :, None].float()
            total += weight * F.pad(rows[:, : self.rows - tap], (0, 0, 0, 0, tap, 0))
        return total.to(x.dtype).view_as(x)
