"""Embeddings and n-gram tables in pinned host memory, from which a GPU reads the rows of a step. No torch."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.errors import UserError
from sglang.srt.plan.equal_layers import interned
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.model_description import ModelDescription

ENCODER = "--encoder-in-main-memory"


def has_tables(model: ModelDescription) -> bool:
    """Returns whether any layer has n-gram tables."""
    return any(layer.ngrams.table for layer in model.layers)


def with_tables(model: ModelDescription, on_host: bool) -> ModelDescription:
    """Returns the model with its n-gram tables in host memory (`on_host`) or in GPU memory."""
    layers = (
        replace(layer, ngrams=replace(table, on_host=on_host)) if (table := layer.ngrams.table) else layer
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def with_embeddings(model: ModelDescription) -> ModelDescription:
    """Returns the model with its embeddings in host memory: of the vocabulary, unless the output head multiplies by
    them, and per layer. Raises UserError if there is nothing to put there."""
    if model.transformers_class is not None:
        raise UserError("--embed-in-main-memory: the embedding of a class of transformers stays in GPU memory")
    if model.tie_embeddings and model.per_layer_inputs is None:
        raise UserError(
            f"--embed-in-main-memory: the output head of {model.title} multiplies by the embedding, which therefore"
            " stays in GPU memory. Remove the flag."
        )
    layers = interned(
        replace(layer, inputs=replace(table, on_host=True)) if (table := layer.inputs.per_layer) else layer
        for layer in model.layers
    )
    embedding = replace(model.embedding, on_host=not model.tie_embeddings)
    return replace(model, embedding=embedding, layers=layers)


def with_encoder(model: ModelDescription) -> ModelDescription:
    """Returns the model with the layers of its encoder of images in main memory. Raises UserError if there are none."""
    media = model.media
    if model.transformers_class is not None:
        raise UserError(f"{ENCODER}: the encoder of a class of transformers stays in GPU memory. Remove the flag.")
    if media is None:
        raise UserError(f"{ENCODER}: no images are read here ({model.title}). Remove the flag.")
    tower = replace(media.tower, on_host=True)
    if not tower.streamed_layers():
        raise UserError(f"{ENCODER}: the encoder of {model.title} is a single layer. Remove the flag.")
    return replace(model, media=replace(media, tower=tower))


def host_table_bytes(model: ModelDescription, parallel: ParallelConfig) -> int:
    """Returns the bytes of tables in host memory, and of layers of an encoder, for each rank of the stage that has
    them."""
    tables = (table for layer in model.layers if (table := layer.ngrams.table))
    ngrams = sum(
        table.table_elements(parallel.attn_tp_size) * KV_DTYPE_BYTES[table.table_dtype or parallel.dtype]
        for table in tables
        if table.on_host
    )
    ranks, per_layer = parallel.ranks.vocab_tp_size, model.per_layer_inputs
    elements = 0
    if model.embedding.on_host:
        elements += -(-model.vocab_size // ranks) * model.hidden_size
    if per_layer is not None and per_layer.on_host:
        elements += per_layer.table_elements(ranks)
    if model.media is not None and model.media.tower.on_host:
        elements += sum(model.media.tower.layer_sizes())
    total: int = ngrams + elements * KV_DTYPE_BYTES[parallel.dtype]
    return total


def host_table_note(model: ModelDescription, size: int) -> str:
    """Returns the note for the user about tables of `size` bytes."""
    where = f"in pinned host memory, {size / 1024**3:.2f} GiB for each GPU that has them"
    of_encoder = model.media is not None and model.media.tower.on_host
    embeds = model.embedding.on_host or bool(model.per_layer_inputs and model.per_layer_inputs.on_host)
    if not any(table.on_host for layer in model.layers if (table := layer.ngrams.table)):
        what = [*["embeddings"] * embeds, *["the layers of the encoder"] * of_encoder]
        return f"{' and '.join(what)} lie {where}"
    return (
        f"the tables of n-grams lie {where}; in GPU memory their rows would be read faster: more GPUs (--tp-size), or"
        " --no-ple-offload-embedding where they fit"
    )
