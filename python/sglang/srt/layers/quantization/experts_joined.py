"""Quantized experts with one tensor per product, columns first and gate before up, as ModelOpt writes Llama 4."""

from __future__ import annotations

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES
from sglang.srt.layers.parameter import Convert, Fill, Scope, TensorPart, WeightShard, constant, random_codes
from sglang.srt.layers.quantization.expert_sizes import ExpertProduct, ExpertSizes
from sglang.srt.layers.quantization.experts_finish import StoredProduct
from sglang.srt.layers.quantization.experts_fused import PROJECTIONS, then
from sglang.srt.layers.quantization.layout import Leaf, layout_of
from sglang.srt.layers.quantization.stored import DUMMY_INPUT_SCALE, DUMMY_SCALES, dummy_scale
from sglang.srt.plan.weight_names import PartKey

FORM = "columns"
"""The 16-bit form of families whose quantized experts may be stored this way."""


def is_joined(sizes: ExpertSizes, quant: ModuleQuant | None) -> bool:
    """Returns whether the experts are stored this way."""
    return quant is not None and sizes.form == FORM and quant.storage == "modelopt"


class JoinedExperts:
    """Creates the parameters of one product, named as the tensors: the projection's name, and for all but the codes an
    underscore and the usual name of the number."""

    def __init__(self, scope: Scope, product: ExpertProduct, sizes: ExpertSizes, quant: ModuleQuant) -> None:
        self.scope, self.product, self.sizes, self.scheme = scope, product, sizes, quant.format
        self.layout = layout_of(quant)
        self.every = slice(0, sizes.num_local)

    def stored(self) -> StoredProduct:
        """Returns the product with its parameters."""
        scheme, layout, product = self.scheme, self.layout, self.product
        shape: tuple[int, ...] = (product.rows, product.cols * scheme.bits // 8)
        codes = self._matrices(
            "", layout.data, layout.data.columns, shape, random_codes, ELEMENT_DTYPES[scheme.element]
        )
        dummy = DUMMY_SCALES[scheme.element]
        if scheme.group == (0, 0):
            scale = self._singles(layout.scale, dummy)
        else:
            shape = scheme.scale_shape(product.rows, product.cols)
            dtype, fill = SCALE_DTYPES[scheme.scale], dummy_scale(scheme)
            scale = self._matrices("_" + layout.scale.name, layout.scale, scheme.group[1], shape, fill, dtype)
        factor = None if layout.global_scale is None else self._singles(layout.global_scale, dummy)
        inputs = None if layout.input_scale is None else self._singles(layout.input_scale, DUMMY_INPUT_SCALE)
        return StoredProduct(self.scope.path, scheme, product.at, codes, scale, factor, inputs, None)

    def _key(self, shard: WeightShard) -> PartKey:
        layer = self.scope.path.split(".", 2)[2]
        return PartKey(shard.part, module=layer.removesuffix(self.product.name) + "experts")

    def _matrices(
        self, ending: str, leaf: Leaf, columns: int, shape: tuple[int, ...], fill: Fill, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns a parameter [E, rows, stored columns]; one stored element holds `columns` columns of a matrix."""
        parts: dict[PartKey, TensorPart] = {}
        shards = self.product.shards
        for i, shard in enumerate(shards):
            cols, of_cols = shard.cols.groups(columns)
            rows, first = shard.rows, i * shard.rows.total
            parts[self._key(shard)] = TensorPart(
                (self.sizes.num_experts, cols, len(shards) * rows.total),
                (self.sizes.local, of_cols, slice(first + rows.run.start, first + rows.run.stop)),
                (
                    self.every,
                    slice(self.product.at[i], self.product.at[i] + rows.count),
                    slice(0, -(-shard.cols.count // columns)),
                ),
                leaf.dtypes,
                then(_rows_first, leaf.convert) if leaf.convert else _rows_first,
            )
        return self._param(ending, (self.sizes.padded_experts, *shape), parts, fill, dtype)

    def _singles(self, leaf: Leaf, dummy: float) -> torch.Tensor:
        """Returns a parameter [E, matrices] fp32 from the checkpoint's one number for all."""
        count = len(self.product.shards)
        parts = {
            self._key(shard): TensorPart(
                (), (), (self.every, i), leaf.dtypes, _for_experts(self.sizes.num_local, leaf.convert)
            )
            for i, shard in enumerate(self.product.shards)
        }
        shape = (self.sizes.padded_experts, count)
        return self._param("_" + leaf.name, shape, parts, constant(dummy), torch.float32)

    def _param(
        self, ending: str, shape: tuple[int, ...], parts: dict[PartKey, TensorPart], fill: Fill, dtype: torch.dtype
    ) -> torch.Tensor:
        tensor = self.scope.param(PROJECTIONS[self.product.name] + ending, shape, parts, fill, dtype)
        if (self.product.padded or self.sizes.num_local < self.sizes.padded_experts) and not tensor.is_meta:
            tensor.zero_()
        return tensor


def _rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes [E, K, N] to [E, N, K]."""
    return tensor.transpose(1, 2)


def _for_experts(count: int, convert: Convert | None) -> Convert:
    """Returns a conversion of one number for all experts to [E]."""

    def expand(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if convert is None else convert(tensor)).reshape(1).expand(count)

    return expand
