"""N-gram embeddings before a layer: computes from residual streams and token ids an addition to the streams.

A token's n-grams are hashed to rows of a table. A projection of these rows gives a key per stream and one value, which
each stream gates; then follows a convolution over neighbouring tokens. A request's state is the ids and convolution
inputs of its last tokens; a verify step leaves it unchanged and records its tokens.

Source: the published classes of Qwen3.8-Flash-Next in transformers (`Qwen4ExpTextPLELayer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.ngram_embedding.reference import NGRAM_EMBEDDING_OP
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.ngram_embedding.table import NgramTable
from sglang.srt.layers.block import DefersNoSum, Site
from sglang.srt.layers.compressed_step import TokenRequests, compressed_step
from sglang.srt.layers.kept_rows import record_rows
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.ranks import whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class NgramBlock(DefersNoSum):
    """N-gram embeddings, streams [T, N, H] -> addition to the streams [T, N, H]."""

    def __init__(self, scope: Scope, spec: NgramEmbedding, site: Site) -> None:
        self.spec, self.eps = spec, site.model.norm_eps
        self.table = NgramTable(scope, spec)
        self.cache = scope.cache(site.layer_id, "ngrams")
        shape = (spec.streams, spec.stream_size)
        wide = spec.streams * spec.stream_size
        into = scope.sub("project")
        self.project = ColumnParallelLinear(into, into.matrix(), {"key": whole(wide), "value": whole(spec.stream_size)})

        def norm(name: str) -> torch.Tensor:
            part = TensorPart((wide,), convert=lambda stored: (stored.float() + 1.0).view(shape))
            return scope.sub(name).param("weight", shape, {PartKey(): part}, Init.ONES, torch.float32)

        self.key_norm, self.query_norm, self.conv_norm = norm("key_norm"), norm("query_norm"), norm("conv_norm")
        taps = TensorPart((wide, 1, spec.taps), convert=lambda stored: stored[:, 0])
        self.conv = scope.sub("conv").param("weight", (wide, spec.taps), {PartKey(): taps})
        self.kernels = scope.plan.entry(NGRAM_EMBEDDING_OP)

    def __call__(self, streams: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        requests, cache = compressed_step(batch).requests, self.cache
        rows = self.table.rows_of_rank(batch.input_ids, cache["ids"], requests)
        if batch.state_records is None:  # before anything travels: there the other half of a step may go on, and reads
            self.kernels.keep(batch.input_ids, cache["ids"], requests)
        products = self.project(self.table.gathered(rows))
        values, normed = self.kernels.gate(products, streams, self.key_norm, self.query_norm, self.conv_norm, self.eps)
        self.kernels.convolve(values, normed, self.conv, self.spec.longest, cache["rows"], requests)
        if batch.state_records is None:
            self.kernels.keep(normed, cache["rows"], requests)
        else:
            record_rows(batch, self._keep, requests, batch.input_ids, normed)
        return values

    def _keep(self, ids: torch.Tensor, rows: torch.Tensor, requests: TokenRequests) -> None:
        self.kernels.keep(ids, self.cache["ids"], requests)
        self.kernels.keep(rows, self.cache["rows"], requests)
