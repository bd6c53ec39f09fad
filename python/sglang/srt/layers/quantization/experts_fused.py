"""Checkpoints that store a layer's experts in one tensor: the slices that a rank reads, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.parameter import FLOATS, Convert, TensorPart, WeightShard
from sglang.srt.plan.ranks import exact_share

PROJECTIONS = {"w13": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class FusedLeaf:
    """One tensor of all experts, named by the projection and `ending`. `shape` maps (rows, columns) of one expert's
    matrix, and `source` the slices of them that a rank holds, to those of the tensor, without the expert dim.
    `columns`: matrix columns per element of the parameter; 0: it has no columns. `convert`: as in TensorPart. `other`:
    an alternative form."""

    ending: str
    shape: Callable[[int, int], tuple[int, ...]]
    source: Callable[[slice, slice], tuple[slice, ...]]
    columns: int = 1
    dtypes: tuple[str, ...] = FLOATS
    convert: Convert | None = None
    other: FusedLeaf | None = None

    def name(self, product: str) -> str:
        """Returns the tensor's name."""
        return PROJECTIONS[product] + self.ending


@dataclass(frozen=True, slots=True)
class FusedForm:
    """A form of fused experts. `alternating`: gate's rows are the even ones and up's the odd ones; otherwise up's
    follow gate's."""

    data: FusedLeaf
    scale: FusedLeaf | None
    bias: FusedLeaf
    alternating: bool

    def cuts(
        self,
        shards: Sequence[WeightShard],
        at: Sequence[int],
        leaf: FusedLeaf,
        num_experts: int,
        local: slice,
        share: int,
    ) -> list[TensorPart]:
        """Returns the parts of one leaf's parameter, one per shard, or a single one for interleaved rows. `local`: this
        rank's experts. `share`: padded rows of each of two matrices."""
        first = shards[0]
        if len(shards) == 2 and self.alternating:
            rows = first.rows.scale_dims(2)
            both = replace(first, rows=rows)
            return [_cut(both, leaf, num_experts, local, None, then(leaf.convert, _in_halves(share)))]
        out = len(shards) * first.rows.total
        cuts = []
        for i, shard in enumerate(shards):
            begin = i * first.rows.total
            rows = exact_share(out, slice(begin + shard.rows.run.start, begin + shard.rows.run.stop))
            cuts.append(_cut(replace(shard, rows=rows), leaf, num_experts, local, at[i], leaf.convert))
        return cuts


def _cut(
    shard: WeightShard, leaf: FusedLeaf, num_experts: int, local: slice, at: int | None, convert: Convert | None
) -> TensorPart:
    """Returns the part with a slice of each local expert, for the parameter's rows from `at` on; for all rows without
    `at`."""
    every = slice(0, local.stop - local.start)
    if leaf.other is not None:
        other = _cut(shard, leaf.other, num_experts, local, at, leaf.other.convert)
        return replace(_cut(shard, replace(leaf, other=None), num_experts, local, at, convert), other=other)
    shape = (num_experts, *leaf.shape(shard.rows.total, shard.cols.total))
    source = (local, *leaf.source(shard.rows.run, shard.cols.run))
    if at is None:
        return TensorPart(shape, source, (every,), leaf.dtypes, convert)
    rows = slice(at, at + shard.rows.count)
    if leaf.columns == 0:  # no columns: a bias
        return TensorPart(shape, source, (every, rows), leaf.dtypes, convert)
    cols = -(-shard.cols.count // leaf.columns)
    return TensorPart(shape, source, (every, rows, slice(0, cols)), leaf.dtypes, convert)


def _in_halves(share: int) -> Convert:
    """Returns a conversion of [E, 2n, ...] with interleaved rows to [E, 2 * share, ...]: the even rows, then the odd
    rows, each zero-padded to `share`."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        num_experts, rows, *rest = tensor.shape
        halves = tensor.unflatten(1, (rows // 2, 2)).transpose(1, 2)
        if rows == 2 * share:
            return halves.flatten(1, 2)
        padded = tensor.new_zeros((num_experts, 2, share, *rest))
        padded[:, :, : rows // 2] = halves
        return padded.flatten(1, 2)

    return convert


def then(first: Convert | None, second: Convert) -> Convert:
    """Returns the composition of both conversions."""
    return second if first is None else lambda tensor: second(first(tensor))


def _columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes [E, K, N] to [E, N, K]."""
    return tensor.transpose(1, 2)


def _by_32(cols: slice) -> slice:
    return slice(cols.start // 32, cols.stop // 32)


_BIAS = FusedLeaf("_bias", lambda out, size: (out,), lambda rows, cols: (rows,), columns=0)
_ROWS = FusedLeaf("", lambda out, size: (out, size), lambda rows, cols: (rows, cols))
_COLUMNS = FusedLeaf("", lambda out, size: (size, out), lambda rows, cols: (cols, rows), convert=_columns_first)
# 32 columns are 16 bytes, low bits first.
_BLOCKS = FusedLeaf(
    "_blocks", lambda out, size: (out, size // 32, 16), lambda rows, cols: (rows, _by_32(cols)), 2, ("U8",)
)
_EXPONENTS = FusedLeaf(
    "_scales", lambda out, size: (out, size // 32), lambda rows, cols: (rows, _by_32(cols)), 32, ("U8",)
)

FUSED: Mapping[str, FusedForm] = {
    # GPT-OSS: as published, and in 16 bits.
    "mxfp4": FusedForm(_BLOCKS, _EXPONENTS, _BIAS, alternating=True),
    "gpt_oss": FusedForm(_COLUMNS, None, _BIAS, alternating=True),
    # In 16 bits: Qwen3.5, Mistral 4, and Qwen3-VL as published; transformers 5 writes the last as the first.
    "stacked": FusedForm(_ROWS, None, _BIAS, alternating=False),
    "columns": FusedForm(_COLUMNS, None, _BIAS, alternating=False),  # Llama 4
    "alternating": FusedForm(_ROWS, None, _BIAS, alternating=True),  # Inkling
    "stacked_columns": FusedForm(replace(_COLUMNS, other=_ROWS), None, _BIAS, alternating=False),
}
"""The forms by storage, or, for 16-bit weights, by the form that the family declares."""
