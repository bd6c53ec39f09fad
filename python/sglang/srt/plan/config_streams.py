"""Reads from config.json how residual streams are connected, and before which layers embeddings of n-grams are
added."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.layer_spec import GatedStreams, HyperConnections, Residual, Sum
from sglang.srt.plan.ngram_embedding import NgramEmbedding

WIDE_TABLE, FP8_TABLE = "bfloat16", "float8_e4m3fn"
TABLE_DTYPES = {WIDE_TABLE: "", "float16": "", "float32": "", FP8_TABLE: "fp8_e4m3"}
"""Dtypes of n-gram tables by their names in config.json; "": the model's dtype."""


def residual_streams(keys: ConfigReader, usual: Residual) -> Residual:
    """Returns the residual of all layers: the family's, unless keys describe several streams."""
    if keys.count("hc_mult") > 1:
        rounds, eps = keys.positive("hc_sinkhorn_iters", 20), keys.default("hc_eps", float, 1e-6)
        mean_head = isinstance(usual, HyperConnections) and usual.mean_head
        lagged = isinstance(usual, HyperConnections) and usual.lagged
        lagged = keys.default("hc_pre_from_prev_sublayer", bool, lagged)
        return HyperConnections(keys.positive("hc_mult"), rounds, eps, mean_head, lagged)
    if keys.count("hc_lowrank"):
        return GatedStreams(keys.positive("hc_count"), keys.positive("hc_lowrank"))
    if isinstance(usual, Sum):
        return replace(usual, eps_after=keys.default("post_norm_eps", float, usual.eps_after))
    return usual


def ngram_embeddings(keys: ConfigReader, num_layers: int, quantized: bool) -> dict[int, NgramEmbedding]:
    """Returns the n-gram embeddings by the number of the layer before which they are added. Tables whose dtype
    config.json does not state are in FP8 if the checkpoint is `quantized`. Raises UserError."""
    listed = sorted(set(keys.default("ple_layer_ids", list, [])))  # counted from 1
    wrong = [layer for layer in listed if type(layer) is not int or not 1 <= layer <= num_layers]
    if wrong:
        raise UserError(f"{keys.source}: 'ple_layer_ids' must be numbers from 1 to {num_layers}; got {wrong}.")
    return {
        layer - 1: _table(keys, number, FP8_TABLE if quantized else WIDE_TABLE) for number, layer in enumerate(listed)
    }


def _table(keys: ConfigReader, number: int, dtype: str) -> NgramEmbedding:
    hidden = keys.positive("hidden_size")
    longest, heads = keys.positive("ngram_size", 3), keys.positive("heads_per_ngram", 8)
    width = keys.positive("ple_embed_dim", hidden)
    num_heads = (longest - 1) * heads
    if not num_heads or width % num_heads:
        raise UserError(
            f"{keys.source}: 'ple_embed_dim' {width} is not a multiple of the {num_heads} rows that 'ngram_size' and"
            " 'heads_per_ngram' make of a token."
        )
    return NgramEmbedding(
        longest=longest,
        heads=heads,
        dim=width // num_heads,
        base_rows=_base_rows(keys),
        row_multiple=keys.positive("make_ngram_vocab_size_divisible_by", 128),
        number=number,
        seed=keys.default("seed", int, 1234),
        vocab_size=keys.positive("vocab_size"),
        end_token=_end_token(keys),
        taps=keys.positive("ple_conv_kernel_size", 4),
        streams=keys.positive("hc_count"),
        stream_size=hidden,
        parts=keys.positive("split_ngram_parts", 512),
        table_dtype=TABLE_DTYPES.get(keys.default("ple_embedding_dtype", str, dtype), ""),
    )


MOST_ROWS = 1 << 28
"""Most rows of a head's part of a table: primes are searched one by one."""


def _base_rows(keys: ConfigReader) -> int:
    base = keys.default("ngram_vocab_size_base", int, 20_000_000)
    if not 2 <= base <= MOST_ROWS:
        raise UserError(f"{keys.source}: 'ngram_vocab_size_base' must be between 2 and {MOST_ROWS:,}; got {base:,}.")
    return base


def _end_token(keys: ConfigReader) -> int:
    """Returns the first of the end tokens."""
    written = keys.values.get("eos_token_id")
    token = written[0] if isinstance(written, list) and written else written
    if type(token) is not int or not 0 <= token < keys.positive("vocab_size"):
        raise UserError(f"{keys.source}: n-grams end at 'eos_token_id', which must be a token id; got {written!r}.")
    return token
