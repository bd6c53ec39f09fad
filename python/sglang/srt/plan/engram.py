"""DeepSeek-V4.1's Engram: embeddings of n-grams of normalized token texts, gated into the residual streams, as a block
of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import PER_REQUEST, CacheSpec, CacheTensor, Elements, Matrix, ParallelConfig, Weights
from sglang.srt.plan.ngram_embedding import LAYER_SEEDS, NgramEmbedding
from sglang.srt.plan.ranks import RankLayout

SCALE_GROUP = 32
"""Columns of a row of the table that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engram(NgramEmbedding):
    """An NgramEmbedding without a convolution: the streams take the gated value.

        num_texts: number of different token texts after normalizing case, accents and spaces (`utils.token_texts`),
            whose ids are hashed
        pad_token: stands for tokens before a request's first one
        layer: number of the layer, which seeds the hash
        image_token: image tokens add nothing to the streams, and n-grams do not cross them (`pad_token` stands for them
            and for earlier tokens); None: images are not served

    A table in e4m3 has an e8m0 scale for every SCALE_GROUP columns.
    """

    layer: int
    num_texts: int
    pad_token: int
    image_token: int | None = None

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd factors of an n-gram's text ids in the hash, the last token first: pseudo-random numbers seeded by the
        layer's number."""
        import numpy as np  # not at the top, because commands that plan nothing should not load it

        bound = max(1, int(np.iinfo(np.int64).max) // self.num_texts // 2)
        drawn = np.random.default_rng(LAYER_SEEDS * self.layer).integers(0, bound, size=self.longest, dtype=np.int64)
        return tuple(2 * int(number) + 1 for number in drawn)

    @property
    def scale_columns(self) -> int:
        return self.dim // SCALE_GROUP if self.table_dtype else 0

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("ngram_embedding", q_dtype=parallel.dtype, kv_dtype=self.table_dtype or parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the state of a request: the text ids of its last tokens."""
        ids = CacheTensor("ids", (self.longest - 1,), "int32")
        return (CacheSpec("ngrams", (ids,), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        wide = self.streams * hidden_size
        table = Elements(0 if self.on_host else self.table_elements(ranks.attn_tp_size), self.table_dtype or None)
        return (
            Matrix("ngrams.project", ("",), wide + hidden_size, self.width),
            Elements(3 * wide, "float32"),
            Elements(self.vocab_size, "int64"),
            table,
        )

    def table_elements(self, tp_size: int) -> int:
        """Returns the elements of a rank's part of the table, with the scales, of a byte each."""
        return self.rank_rows(tp_size) * (self.dim + self.scale_columns)


def engrams(keys: ConfigReader, num_layers: int, quantized: bool) -> dict[int, Engram]:
    """Returns the embeddings by the number of the layer before which they are added. Raises UserError for tables whose
    size does not match their hash."""
    listed = keys.default("engram_layer_ids", list, [])
    if any(type(layer) is not int or layer < 0 for layer in listed):
        raise UserError(f"{keys.source}: 'engram_layer_ids' must be a list of layers' numbers; got {listed!r}.")
    sizes = keys.default("engram_num_embeddings", list, [])
    if len(sizes) != len(listed):
        raise UserError(f"{keys.source}: {len(listed)} 'engram_layer_ids', but {len(sizes)} 'engram_num_embeddings'.")
    tables: dict[int, Engram] = {}
    for number, (layer, stated) in enumerate(zip(listed, sizes, strict=True)):
        if layer >= num_layers:  # of draft layers
            continue
        tables[layer] = table = _table(keys, layer, number, quantized)
        if table.rows != stated:
            raise UserError(
                f"{keys.source}: layer {layer}'s table of n-grams has {stated} rows by 'engram_num_embeddings', and"
                f" {table.rows} by 'engram_vocab_size' and the number of its heads."
            )
    return tables


def _table(keys: ConfigReader, layer: int, number: int, quantized: bool) -> Engram:
    longest, dim = keys.positive("engram_max_ngram_size"), keys.positive("engram_head_dim")
    vocab_size, pad_token = keys.positive("vocab_size"), keys.require("engram_pad_token_id", int)
    if longest < 2 or not 0 <= pad_token < vocab_size:
        raise UserError(
            f"{keys.source}: 'engram_max_ngram_size' {longest} must be 2 or more, and 'engram_pad_token_id'"
            f" {pad_token} a token."
        )
    if quantized and dim % SCALE_GROUP:
        raise UserError(f"{keys.source}: 'engram_head_dim' {dim} is no multiple of {SCALE_GROUP}, which share a scale.")
    return Engram(
        longest=longest,
        heads=keys.positive("engram_n_heads"),
        dim=dim,
        base_rows=keys.positive("engram_vocab_size"),
        row_multiple=1,
        number=number,
        seed=0,
        vocab_size=vocab_size,
        end_token=-1,  # none ends a segment
        taps=1,
        streams=keys.positive("hc_mult"),
        stream_size=keys.positive("hidden_size"),
        parts=1,
        table_dtype="fp8_e4m3" if quantized else "",
        layer=layer,
        num_texts=keys.positive("engram_compressed_vocab_size"),
        pad_token=pad_token,
    )
