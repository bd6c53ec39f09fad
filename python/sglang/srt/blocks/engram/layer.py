"""DeepSeek-V4.1's Engram before a layer: computes from residual streams and token ids an addition to the streams.

A token's n-grams, as numbers of the tokens' texts, are hashed to rows of a table. A projection of these rows gives a
key per stream and one value, which each stream gates. Image tokens (OF_IMAGE instead of a text number) add nothing and
end the n-grams of later tokens. A request's state is the text numbers of its last tokens; a verify step leaves it
unchanged and records its tokens.

Source: the inference code beside the checkpoint of V4.1-Flash, as others describe it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.blocks.ngram_embedding.reference import NGRAM_EMBEDDING_OP
from sglang.srt.blocks.ngram_embedding.table import FP8_FILES
from sglang.srt.layers.block import DefersNoSum, Site
from sglang.srt.layers.compressed_step import TokenRequests, compressed_step
from sglang.srt.layers.kept_rows import keep_rows
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.parameter import FLOATS, Init, Scope, TensorPart, constant, random_codes
from sglang.srt.layers.quantization.layout import as_bytes
from sglang.srt.plan.weight_names import PartKey
from sglang.srt.utils.token_texts import read_text_numbers

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

_DUMMY_EXPONENT = 127 - 12
OF_IMAGE = -1
"""Text number of image tokens."""


class EngramBlock(DefersNoSum):
    """Engram, streams [T, N, H] -> addition to the streams [T, N, H]."""

    def __init__(self, scope: Scope, spec: Engram, site: Site) -> None:
        self.spec, self.eps = spec, site.model.norm_eps
        self.group, self.dtype = scope.groups.attention, scope.dtype
        self.table, self.scale, self.first_row = _table(scope, spec)
        self.cache = scope.cache(site.layer_id, "ngrams")
        self.project = ReplicatedLinear(scope.sub("project"))
        shape = (spec.streams, spec.stream_size)
        self.query_weight, self.key_weight = (
            scope.param(leaf, shape, init=Init.ONES, dtype=torch.float32) for leaf in ("q_weight", "k_weight")
        )
        self.ones = scope.param("ones", shape, {}, Init.ONES, torch.float32)  # the kernel norms by a weight too
        self.ones.fill_(1.0)
        self.texts = scope.param("texts", (spec.vocab_size,), {}, Init.ZEROS, torch.int64)
        self.kernels = scope.plan.entry(NGRAM_EMBEDDING_OP)
        self.hashed: NgramHash | None = None
        self.directory, self.device = scope.plan.model.model_path, scope.device
        scope.finish.append(self.read_tokens)

    def read_tokens(self) -> None:
        """Reads the numbers of token texts and builds the hash. Raises UserError if the checkpoint lacks the tokenizer
        with which its tables were made."""
        spec, device = self.spec, self.device
        numbers = read_text_numbers(self.directory, spec.vocab_size, spec.num_texts)
        num = spec.num_heads // self.group.size
        first_head = self.group.rank * num
        sizes = spec.head_rows[first_head : first_head + num]
        offsets = [sum(sizes[:head]) for head in range(num)]
        self.texts.copy_(torch.from_numpy(numbers))
        if spec.image_token is not None:
            self.texts[spec.image_token] = OF_IMAGE
        self.hashed = NgramHash(
            torch.tensor(spec.multipliers, device=device),
            torch.tensor(sizes, device=device),
            torch.tensor(offsets, device=device),
            first_head,
            spec.heads,
            OF_IMAGE,
            int(numbers[spec.pad_token]),
        )

    def __call__(self, streams: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        assert self.hashed is not None, "the weights are loaded"
        requests = compressed_step(batch).requests
        texts = self.texts[batch.input_ids]
        rows = torch.empty((len(texts), len(self.hashed.sizes) * self.spec.dim), dtype=self.dtype, device=texts.device)
        self.kernels.rows(texts, self.cache["ids"], requests, self.hashed, self.table, self.scale, rows)
        # The state goes on before anything travels: there the other half of a step may go on, and reads it.
        keep_rows(batch, self.keep, requests, texts)
        products = self.project(self.group.all_gather(rows))
        gated, _ = self.kernels.gate(products, streams, self.key_weight, self.query_weight, self.ones, self.eps)
        if self.spec.image_token is not None:
            gated.masked_fill_((texts == OF_IMAGE)[:, None, None], 0.0)
        return gated

    def keep(self, texts: torch.Tensor, requests: TokenRequests) -> None:
        """Keeps each request's last text numbers for the next step."""
        self.kernels.keep(texts, self.cache["ids"], requests)


def _table(scope: Scope, spec: Engram) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Returns this rank's rows of the table [room, D], their scales [room, D / 32] as bytes (None: not quantized), and
    the number of the first row."""
    num = spec.num_heads // scope.groups.attention.size
    first_head = scope.groups.attention.rank * num
    first = sum(spec.head_rows[:first_head])
    count, room = (
        sum(spec.head_rows[first_head : first_head + num]),
        spec.rank_rows(scope.groups.attention.size),
    )
    into = scope.sub("table")

    def parameter(leaf: str, columns: int, part: TensorPart, init: object, dtype: torch.dtype | None) -> torch.Tensor:
        rows = replace(part, source=(slice(first, first + count),), dest=(slice(0, count),))
        tensor = into.param(leaf, (room, columns), {PartKey(): rows}, init, dtype, pinned=spec.on_host)  # type: ignore[arg-type]
        if not tensor.is_meta:
            tensor[count:].view(torch.uint8).zero_()
        return tensor

    if not spec.table_dtype:
        return (
            parameter("weight", spec.dim, TensorPart((spec.rows, spec.dim), dtypes=FLOATS), Init.NORMAL, None),
            None,
            first,
        )
    values = TensorPart((spec.rows, spec.dim), dtypes=FP8_FILES)
    exponents = TensorPart((spec.rows, spec.scale_columns), dtypes=("F8_E8M0", "U8"), convert=as_bytes)
    weight = parameter("weight", spec.dim, values, random_codes, torch.float8_e4m3fn)
    scale = parameter("scale", spec.scale_columns, exponents, constant(_DUMMY_EXPONENT), torch.uint8)
    return weight, scale, first
