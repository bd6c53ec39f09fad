"""N-gram tables in pinned host memory, from which a GPU reads the rows of a step. No torch."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription


def has_tables(model: ModelDescription) -> bool:
    """Returns whether any layer has n-gram tables."""
    return any(isinstance(layer.ngrams, NgramEmbedding) for layer in model.layers)


def with_tables(model: ModelDescription, on_host: bool) -> ModelDescription:
    """Returns the model with its n-gram tables in host memory (`on_host`) or in GPU memory."""
    layers = [
        replace(layer, ngrams=replace(layer.ngrams, on_host=on_host))
        if isinstance(layer.ngrams, NgramEmbedding)
        else layer
        for layer in model.layers
    ]
    return replace(model, layers=tuple(layers))


def host_table_bytes(model: ModelDescription, parallel: ParallelConfig) -> int:
    """Returns the bytes of n-gram tables in host memory, for each rank of the stage that has them."""
    tables = (layer.ngrams for layer in model.layers if isinstance(layer.ngrams, NgramEmbedding))
    return sum(
        table.table_elements(parallel.attn_tp_size) * KV_DTYPE_BYTES[table.table_dtype or parallel.dtype]
        for table in tables
        if table.on_host
    )


def host_table_note(size: int) -> str:
    """Returns the note for the user about tables of `size` bytes."""
    return (
        f"the tables of n-grams lie in pinned host memory, {size / 1024**3:.2f} GiB for each GPU that has them; in GPU"
        " memory their rows would be read faster: more GPUs (--tp-size), or --no-ple-offload-embedding where they fit"
    )
