"""Linear layers of EXL3 checkpoints: which tensors a rank reads, and the layer over them.

Each module of a product (q, k, v; gate, up) keeps tiles, bits and scales of its own. Ranks cut whole blocks of 128 rows
or columns; only of an output head a rank reads the blocks around its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.trellis import BLOCK, DEFAULT_CODEBOOK, MARKERS, TILE, Trellis, padded
from sglang.srt.errors import UserError
from sglang.srt.layers.ops import TRELLIS_LINEAR
from sglang.srt.layers.parameter import Convert, Fill, Scope, TensorPart, WeightShard, constant, random_codes
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.layers.quantization.linear_weight import QuantizedProduct
from sglang.srt.layers.quantization.trellis import TrellisModule, TrellisWeight
from sglang.srt.plan.ranks import ShardRange
from sglang.srt.plan.weight_names import PartKey

DUMMY_OUTPUT_SCALE = 0.02 / 1.24
"""Output scale with which random tiles are weights with a standard deviation near 0.02."""
WORD_DTYPES, MARKER_DTYPES = ("I16", "U16"), ("I32", "U32", "I64")


class TrellisLinear:
    """A linear layer, x [T, in] -> [T, out] (+ bias) in x's dtype or `out_dtype`."""

    row_format = None

    def __init__(
        self,
        scope: Scope,
        weight: TrellisWeight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        op = "linear/exl3"
        self.bind = scope.plan.entry(TRELLIS_LINEAR, op)
        self.arch, self.configs = scope.plan.arch, scope.plan.tiles(op, (*weight.shape, bias is not None))
        self.weight: TrellisWeight | None = weight
        self.bias, self.out_dtype = bias, out_dtype
        self.run: QuantizedProduct | None = None
        scope.finish.append(self.finish)

    def finish(self) -> None:
        """Passes the loaded weight to the kernel."""
        assert self.weight is not None
        self.run, self.weight = self.bind(self.weight, self.arch, self.configs), None

    def __call__(self, x: Activations) -> torch.Tensor:
        assert self.run is not None, "the weights are not loaded"
        return self.run(x, self.bias, self.out_dtype)


def create_trellis(scope: Scope, shards: Sequence[WeightShard], quant: ModuleQuant) -> TrellisWeight:
    """Creates parameters for the trellises of shards side by side; several shards may be slices of one module. Raises
    UserError where a rank's share cuts a block."""
    forms = itertools.cycle(quant.trellises)
    pairs = list(zip(shards, forms, strict=False))
    modules, stored, inputs = [], 0, dict[str, torch.Tensor]()
    for part, group in itertools.groupby(pairs, lambda pair: pair[0].part):
        members = list(group)
        module_scope = replace(scope, params={})
        modules.append(_module(module_scope, [shard for shard, _ in members], members[0][1], inputs.get(part)))
        inputs[part] = modules[-1].suh
        for param in module_scope.params.values():
            scope.params[f"{param.name}.{stored}"] = param
            stored += 1
    return TrellisWeight(modules, shards[0].cols.padded_count)


def _module(scope: Scope, pieces: list[WeightShard], form: Trellis, input_scales: torch.Tensor | None) -> TrellisModule:
    """Creates the parameters of slices of one module. input_scales: those of its slices elsewhere in the product."""
    pieces = _joined(pieces)
    rows, cols = sum(piece.rows.padded_count for piece in pieces), pieces[0].cols
    blocks = [share_of_blocks(scope, piece, "rows", len(pieces) > 1) for piece in pieces]
    inputs = share_of_blocks(scope, pieces[0], "columns")
    held_rows = padded(rows) + (BLOCK if _is_head(scope) and rows % BLOCK else 0)
    first = pieces[0].rows.run.start - blocks[0].start
    begins = list(itertools.accumulate((run.stop - run.start for run in blocks), initial=0))
    total = (padded(cols.total), padded(pieces[0].rows.total))
    width = padded(cols.padded_count)
    read = slice(0, inputs.stop - inputs.start)
    outs = [slice(begin, begin + run.stop - run.start) for begin, run in zip(begins, blocks, strict=False)]
    keys = [piece.key for piece in pieces]

    parts = {
        key: TensorPart(
            (total[0] // TILE, total[1] // TILE, form.words),
            (tiles_of(inputs), tiles_of(run), slice(0, form.words)),
            (tiles_of(read), tiles_of(out)),
            WORD_DTYPES,
        )
        for key, run, out in zip(keys, blocks, outs, strict=True)
    }
    shape = (width // TILE, held_rows // TILE, form.words)
    tiles = scope.param("trellis", shape, parts, random_codes, torch.int16)
    suh = input_scales
    if suh is None:
        of_inputs = {keys[0]: scale_part(form, total[0], inputs, cols, 0)}
        suh = _scales(scope, "u", form, width, of_inputs, constant(1.0))
    of_outputs = {
        piece.key: scale_part(form, total[1], run, piece.rows, begin)
        for piece, run, begin in zip(pieces, blocks, begins, strict=False)
    }
    svh = _scales(scope, "v", form, held_rows, of_outputs, constant(DUMMY_OUTPUT_SCALE))
    if form.codebook != DEFAULT_CODEBOOK and input_scales is None:
        marker = {keys[0]: TensorPart((), (), (), MARKER_DTYPES, checked(scope.module(keys[0].part), form.codebook))}
        scope.param(form.codebook, (), marker, constant(0), torch.int32)
    return TrellisModule(form, tiles, suh, svh, first, rows)


def _joined(pieces: list[WeightShard]) -> list[WeightShard]:
    """Returns slices of one module, those that follow each other as one."""
    joined = pieces[:1]
    for piece in pieces[1:]:
        rows, before = piece.rows, joined[-1].rows
        if before.run.stop == rows.run.start and not before.padded:
            both = ShardRange(
                rows.total, slice(before.run.start, rows.run.stop), before.padded_count + rows.padded_count
            )
            joined[-1] = replace(joined[-1], rows=both)
        else:
            joined.append(piece)
    return joined


def share_of_blocks(scope: Scope, shard: WeightShard, what: str, exactly: bool = False) -> slice:
    """Returns the run of a shard's "rows" or "columns" in whole blocks. Raises UserError if these have more than the
    share, unless they are the last ones, or a head's; `exactly`: also then."""
    share = shard.rows if what == "rows" else shard.cols
    run = share.run
    cut = run.start % BLOCK or (run.stop % BLOCK and (exactly or run.stop < share.total))
    if cut and not (_is_head(scope) and what == "rows"):
        raise UserError(
            f"{scope.module(shard.part)}: {BLOCK} {what} are one block of its trellis, but with --tp-size"
            f" {scope.groups.tp.size} a rank holds {what} {run.start} to {run.stop} of {share.total}; choose another"
            " --tp-size"
        )
    return slice(run.start // BLOCK * BLOCK, padded(run.stop))


def _is_head(scope: Scope) -> bool:
    return not scope.path.startswith("layers.")


def tiles_of(run: slice) -> slice:
    """Returns the tiles of a run of rows or columns."""
    return slice(run.start // TILE, run.stop // TILE)


def _scales(
    scope: Scope, side: str, form: Trellis, size: int, parts: Mapping[PartKey, TensorPart], fill: Fill
) -> torch.Tensor:
    """Returns the parameter float16 [size] of the scales of inputs ("u") or outputs ("v"); zero where the checkpoint
    has none."""
    tensor = scope.param(scale_name(form, side), (size,), dict(parts), fill, torch.float16)
    return tensor if tensor.is_meta else tensor.zero_()


def scale_name(form: Trellis, side: str) -> str:
    """Returns the last part of the names of scales of inputs ("u") or outputs ("v")."""
    return f"s{side}" if form.packed_signs else f"s{side}h"


def scale_part(form: Trellis, total: int, blocks: slice, share: ShardRange, begin: int) -> TensorPart:
    """Returns the part of the checkpoint's scales [total] of a share in whole blocks, which goes to `begin`. What pads
    the checkpoint's matrix gets none: its weights are near zero, and not zero."""
    if form.packed_signs:
        source = slice(blocks.start, -(-share.run.stop // TILE) * TILE)
        dest = slice(begin, begin + source.stop - source.start)
        return TensorPart((total // TILE,), (tiles_of(source),), (dest,), WORD_DTYPES, unpacked_signs)
    source = slice(blocks.start, share.run.stop)
    return TensorPart((total,), (source,), (slice(begin, begin + source.stop - source.start),))


def unpacked_signs(words: torch.Tensor) -> torch.Tensor:
    """Returns factors of 1 and -1, float16 [16 n], of words [n] with a bit for each -1, the first in the lowest."""
    bits = words.to(torch.int32)[:, None] >> torch.arange(TILE, dtype=torch.int32) & 1
    return (1 - 2 * bits).flatten().half()


def checked(module: str, codebook: str) -> Convert:
    """Returns a conversion that raises UserError for a marker with another multiplier."""

    def check(read: torch.Tensor) -> torch.Tensor:
        value = int(read) & 0xFFFFFFFF
        if value != MARKERS[codebook]:
            raise UserError(
                f"{module}.{codebook} is {value:#x}: only the multiplier {MARKERS[codebook]:#x} is supported"
            )
        return torch.zeros((), dtype=torch.int32)

    return check
