"""Experts of EXL3 checkpoints: each has trellises of its own, and each projection as many bits in all of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.trellis import DEFAULT_CODEBOOK, TILE, Trellis, padded
from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Fill, Scope, TensorPart, WeightShard, constant, random_codes
from sglang.srt.layers.quantization.expert_sizes import ExpertProduct, ExpertSizes
from sglang.srt.layers.quantization.trellis_banks import Banks, TrellisBank, places_of
from sglang.srt.layers.quantization.trellis_linear import (
    DUMMY_OUTPUT_SCALE,
    MARKER_DTYPES,
    WORD_DTYPES,
    checked,
    scale_name,
    scale_part,
    share_of_blocks,
    tiles_of,
)
from sglang.srt.plan.weight_names import PartKey


class TrellisExperts:
    """The experts of a layer, as `Experts` of other schemes; they lie in GPU memory and take no adapters."""

    adapters = None
    slots = None

    def __init__(
        self, scope: Scope, sizes: ExpertSizes, products: tuple[ExpertProduct, ExpertProduct], quant: ModuleQuant
    ) -> None:
        self.quant: ModuleQuant | None = quant
        what = "experts in EXL3"
        if sizes.w13.slots:
            raise UserError(f"{scope.path}: {what} cannot lie in main memory; remove --enable-paged-experts")
        if sizes.bias or sizes.shared:
            raise UserError(
                f"{scope.path}: {what} with a bias, or with the shared expert among them, are not supported"
            )
        forms = list(quant.trellises[:: len(quant.trellises) // sum(len(one.shards) for one in products)])
        self.w13: Banks
        self.w13, self.w2 = (
            tuple(_bank(scope.sub(product.name), product, sizes, shard, forms.pop(0)) for shard in product.shards)
            for product in products
        )

    def of_step(self, ids: torch.Tensor) -> tuple[Banks, Banks, None]:
        """Returns the weights of both products."""
        return self.w13, self.w2, None


def _bank(scope: Scope, product: ExpertProduct, sizes: ExpertSizes, shard: WeightShard, form: Trellis) -> TrellisBank:
    inputs, outputs = share_of_blocks(scope, shard, "columns"), share_of_blocks(scope, shard, "rows")
    high, wide = product.rows // len(product.shards), product.cols
    total = padded(shard.cols.total), padded(shard.rows.total)
    bank_scope = replace(scope, params={})
    into = slice(0, inputs.stop - inputs.start), slice(0, outputs.stop - outputs.start)

    def param(
        leaf: str, shape: tuple[int, ...], part: TensorPart, fill: Fill, dtype: torch.dtype, zero: bool
    ) -> torch.Tensor:
        run = range(sizes.local.start, sizes.local.stop)
        parts = {PartKey(shard.part, e): replace(part, dest=(place, *part.dest)) for place, e in enumerate(run)}
        others = (e for e in range(sizes.num_experts) if e not in run)
        path = f"{scope.path}.{leaf}"
        scope.on_other_ranks.update(scope.weights.checkpoint_name(path, PartKey(shard.part, e)) for e in others)
        tensor = bank_scope.param(leaf, (sizes.padded_experts, *shape), parts, fill, dtype)
        return tensor.zero_() if zero and not tensor.is_meta else tensor

    tiles = TensorPart(
        (total[0] // TILE, total[1] // TILE, form.words),
        (tiles_of(inputs), tiles_of(outputs), slice(0, form.words)),
        (tiles_of(into[0]), tiles_of(into[1])),
        WORD_DTYPES,
    )
    shape = (padded(wide) // TILE, padded(high) // TILE, form.words)
    words = param("trellis", shape, tiles, random_codes, torch.int16, False)
    scales = []
    for side, size, part, fill in (
        ("u", padded(wide), scale_part(form, total[0], inputs, shard.cols, 0), constant(1.0)),
        ("v", padded(high), scale_part(form, total[1], outputs, shard.rows, 0), constant(DUMMY_OUTPUT_SCALE)),
    ):
        scales.append(param(scale_name(form, side), (size,), part, fill, torch.float16, True))
    if form.codebook != DEFAULT_CODEBOOK:
        marker = TensorPart((), (), (), MARKER_DTYPES, checked(scope.module(shard.part), form.codebook))
        param(form.codebook, (), marker, constant(0), torch.int32, True)
    for name, one in bank_scope.params.items():
        scope.params[f"{name}.{shard.part}"] = one
    return TrellisBank(form, words, scales[0], scales[1], high, wide, places_of(high, padded(high), words.device))
