"""The table of n-gram embeddings: this rank's rows, where they are stored, and the lookup."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.blocks.ngram_embedding.reference import NGRAM_EMBEDDING_OP
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.errors import UserError
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.parameter import FLOATS, Init, Scope, TensorPart, random_codes
from sglang.srt.plan.weight_names import PartKey

FP8_FILES = ("F8_E4M3",)
"""Names in safetensors of the type of a quantized table."""


class NgramTable:
    """Looks up rows by token ids. Heads, each with its part of the table, are sharded over ranks, which gather the
    results."""

    def __init__(self, scope: Scope, spec: NgramEmbedding) -> None:
        self.spec, self.group, self.dtype = spec, scope.groups.attention, scope.dtype
        num = spec.num_heads // self.group.size
        self.heads = slice(self.group.rank * num, (self.group.rank + 1) * num)
        first_row = sum(spec.head_rows[: self.heads.start])
        rows = range(first_row, first_row + sum(spec.head_rows[self.heads]))
        self.weight = _table(scope.sub("table"), spec, rows, spec.rank_rows(self.group.size))
        self.scale: torch.Tensor | None = None
        if spec.table_dtype:
            self.scale = scope.sub("scale").param("weight_scale", (1,), init=Init.ONES, dtype=torch.float32)
        offsets = [sum(spec.head_rows[:head]) for head in range(spec.num_heads)]
        self.numbers = {
            leaf: (_numbers(scope, leaf, values), torch.tensor(values))
            for leaf, values in (
                ("layer_multipliers", spec.multipliers),
                ("ngram_heads_vocab_sizes", spec.head_rows),
                ("ngram_heads_offsets", offsets),
            )
        }
        self.first_row = first_row
        self.hashed: NgramHash | None = None
        scope.finish.append(self._take_numbers)
        self.kernels = scope.plan.entry(NGRAM_EMBEDDING_OP)

    def _take_numbers(self) -> None:
        """Checks the hash. Raises UserError if the checkpoint's numbers differ from those of config.json, since lookups
        would find wrong rows."""
        for leaf, (stored, expected) in self.numbers.items():
            if not torch.equal(stored.cpu(), expected):
                raise UserError(
                    f"the checkpoint's {leaf} are {stored.tolist()}, and by config.json they are {expected.tolist()}:"
                    " is 'seed', 'vocab_size' or 'ngram_vocab_size_base' in it changed?"
                )
        multipliers, sizes, offsets = (stored for stored, _ in self.numbers.values())
        heads, spec = self.heads, self.spec
        self.hashed = NgramHash(
            multipliers, sizes[heads], offsets[heads] - self.first_row, heads.start, spec.heads, spec.end_token
        )

    def rows_of_rank(self, ids: torch.Tensor, kept: torch.Tensor, requests: TokenRequests) -> torch.Tensor:
        """Returns [T, heads / ranks * D] for ids [T], kept [requests, longest - 1] as in `reference.ngram_rows`."""
        assert self.hashed is not None, "the weights are loaded"
        width = len(self.hashed.sizes) * self.spec.dim
        out = torch.empty((len(ids), width), dtype=self.dtype, device=ids.device)
        self.kernels.rows(ids, kept, requests, self.hashed, self.weight, self.scale, out)
        return out

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of this rank's heads into those of all heads, [T, heads * D]. Collective."""
        return self.group.all_gather(rows)


def _numbers(scope: Scope, leaf: str, values: Sequence[int]) -> torch.Tensor:
    """Returns a parameter of integers that checkpoints may contain."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.copy_(torch.tensor(values))

    part = TensorPart((len(values),), dtypes=("I64",), optional=True)
    return scope.param(leaf, (len(values),), {PartKey(): part}, fill, torch.int64)


def _table(scope: Scope, spec: NgramEmbedding, rows: range, room: int) -> torch.Tensor:
    """Returns [room, D], of which the first are `rows` of the whole table; checkpoints split it into equal runs of
    rows."""
    each = -(-spec.rows // spec.parts)
    parts: dict[PartKey, TensorPart] = {}
    for number in range(rows.start // each, -(-rows.stop // each)):
        first = number * each
        begin, end = max(rows.start, first), min(rows.stop, first + each)
        parts[PartKey(f"shard_{number}")] = TensorPart(
            (min(each, spec.rows - first), spec.dim),
            (slice(begin - first, end - first),),
            (slice(begin - rows.start, end - rows.start),),
            FP8_FILES if spec.table_dtype else FLOATS,
        )
    _leave_others(scope, spec, each, parts)
    dtype, init = (torch.float8_e4m3fn, random_codes) if spec.table_dtype else (None, Init.NORMAL)
    weight = scope.param("weight", (room, spec.dim), parts, init, dtype, pinned=spec.on_host)
    if not weight.is_meta:
        weight[len(rows) :].view(torch.uint8).zero_()
    return weight


def _leave_others(scope: Scope, spec: NgramEmbedding, each: int, parts: dict[PartKey, TensorPart]) -> None:
    """Registers the pieces of the table that other ranks hold, and padding after the last row."""
    for number in range(-(-spec.rows // each)):
        key = PartKey(f"shard_{number}")
        if key not in parts:
            scope.on_other_ranks.add(scope.weights.checkpoint_name(f"{scope.path}.weight", key))
