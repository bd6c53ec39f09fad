"""Quantized experts with one tensor per product and interleaved rows of gate and up, as Inkling's NVFP4 checkpoint.

Its scales have other names, which the family's aliases map to those of `JoinedExperts`. An expert has one factor for
gate and up; for the layer's inputs the largest magnitude is stored instead of a scale.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.layers.parameter import FLOATS, Convert, Fill, TensorPart, constant
from sglang.srt.layers.quantization.expert_sizes import ExpertSizes
from sglang.srt.layers.quantization.experts_fused import then
from sglang.srt.layers.quantization.experts_joined import JoinedExperts
from sglang.srt.layers.quantization.layout import Leaf
from sglang.srt.plan.weight_names import PartKey

FORM = "alternating"
"""The 16-bit form of families whose quantized experts may be stored this way."""
LARGEST_SCALED = 448.0 * 6.0
"""Largest magnitude of an input whose scale is 1: of an e4m3 scale times an e2m1 code."""


def alternates(sizes: ExpertSizes, quant: ModuleQuant | None) -> bool:
    """Returns whether the experts are stored this way."""
    return quant is not None and sizes.form == FORM and quant.scheme == "nvfp4" and quant.storage == "modelopt"


class AlternatingExperts(JoinedExperts):
    """Creates the parameters of one product."""

    def _matrices(
        self, ending: str, leaf: Leaf, columns: int, shape: tuple[int, ...], fill: Fill, dtype: torch.dtype
    ) -> torch.Tensor:
        parts: dict[PartKey, TensorPart] = {}
        shards = self.product.shards
        count = len(shards)
        for i, shard in enumerate(shards):
            cols, of_cols = shard.cols.groups(columns)
            run, at = shard.rows.run, self.product.at[i]
            parts[self._key(shard)] = TensorPart(
                (self.sizes.num_experts, count * shard.rows.total, cols),
                (self.sizes.local, slice(count * run.start, count * run.stop), of_cols),
                (self.every, slice(at, at + shard.rows.count), slice(0, -(-shard.cols.count // columns))),
                leaf.dtypes,
                _rows_of(i, count) if leaf.convert is None else then(_rows_of(i, count), leaf.convert),
            )
        return self._param(ending, (self.sizes.padded_experts, *shape), parts, fill, dtype)

    def _singles(self, leaf: Leaf, dummy: float) -> torch.Tensor:
        """Returns a parameter [E, matrices] fp32 from one number per expert, or for inputs one for all."""
        of_inputs = leaf is self.layout.input_scale
        count, num_local = len(self.product.shards), self.sizes.num_local
        shape, source = ((1,), ()) if of_inputs else ((self.sizes.num_experts,), (self.sizes.local,))
        convert = _scale_of_inputs(num_local) if of_inputs else None
        parts = {
            self._key(shard): TensorPart(shape, source, (self.every, i), FLOATS, convert)
            for i, shard in enumerate(self.product.shards)
        }
        return self._param("_" + leaf.name, (self.sizes.padded_experts, count), parts, constant(dummy), torch.float32)


def _rows_of(first: int, count: int) -> Convert:
    """Returns a conversion of [E, count * rows, ...] to every `count`-th row from `first` on."""
    return lambda stored: stored[:, first::count].contiguous()


def _scale_of_inputs(count: int) -> Convert:
    """Returns a conversion of the inputs' largest magnitude [1] to scales [count]."""
    return lambda stored: (stored.float() / LARGEST_SCALED).reshape(1).expand(count)
