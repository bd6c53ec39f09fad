"""Short convolutions: x plus a causal convolution of x over a few tokens (Inkling).

A request's state is the inputs of its last tokens. A verify step leaves it unchanged and records its tokens until some
are accepted. The convolution is linear, so ranks may convolve partial sums before the all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.blocks.short_convolution.reference import SHORT_CONVOLUTION
from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.distributed.groups import Group
from sglang.srt.layers.compressed_step import TokenRequests, compressed_step
from sglang.srt.layers.kept_rows import keep_rows
from sglang.srt.layers.parameter import Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.mem_cache.memory_pool import CacheStore
from sglang.srt.plan.ranks import ShardRange, whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class ConvolvedRows:
    """A short convolution, x [T, C] -> [T, C]. `tensor`: name of the state's tensor in the cache."""

    def __init__(self, scope: Scope, weight: torch.Tensor, cache: CacheStore, tensor: str) -> None:
        """weight: [C, taps]."""
        self.weight, self.cache, self.tensor = weight, cache, tensor
        self.kernels = scope.plan.entry(SHORT_CONVOLUTION)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty_like(x)
        self._convolve(x.contiguous(), out, batch)
        return out

    def in_place(self, x: torch.Tensor, batch: ForwardBatch) -> None:
        """Convolves x [T, C] in place; its row stride is free."""
        self._convolve(x.clone(memory_format=torch.contiguous_format), x, batch)

    def _convolve(self, rows: torch.Tensor, out: torch.Tensor, batch: ForwardBatch) -> None:
        requests = compressed_step(batch).requests
        self.kernels.convolve(rows, self.weight, self.cache[self.tensor], requests, out)
        keep_rows(batch, self.keep, requests, rows)

    def keep(self, rows: torch.Tensor, requests: TokenRequests) -> None:
        """Keeps each request's last rows for the next step."""
        self.kernels.keep(rows, self.cache[self.tensor], requests)


def convolution_weight(scope: Scope, taps: int, parts: dict[str, ShardRange]) -> torch.Tensor:
    """Returns a parameter [channels, taps] from checkpoint tensors [channels, 1, taps] of each part; zeros in
    padding."""
    cuts, begin = dict[PartKey, TensorPart](), 0
    for name, share in parts.items():
        dest = (slice(begin, begin + share.count),)
        cuts[PartKey(name)] = TensorPart(
            (share.total, 1, taps), (share.run,), dest, convert=lambda stored: stored[:, 0]
        )
        begin += share.padded_count
    weight = scope.param("weight", (begin, taps), cuts)
    if any(share.padded for share in parts.values()) and not weight.is_meta:
        weight.zero_()
    return weight


class ConvolvedOutput:
    """A layer's block whose output is convolved. Implements residual.Block."""

    def __init__(self, scope: Scope, spec: ShortConvolution, block: Any, cache: CacheStore, tensor: str) -> None:
        self.block = block
        self.row_format = getattr(block, "row_format", None)
        weight = convolution_weight(scope, spec.taps, {"": whole(spec.channels)})
        self.convolution = ConvolvedRows(scope, weight, cache, tensor)

    def defer_all_reduce(self) -> Group | None:
        """Makes the inner block return partial sums from now on; returns the group to sum over, or None."""
        return self.block.defer_all_reduce()

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        return self.convolution(self.block(x, batch), batch)
