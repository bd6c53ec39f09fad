"""Every Triton launcher with the sizes of the published models, on meta tensors: what the server can ask Triton for.

The sizes are those of the models' descriptions, which the server builds models of, on one rank of every layout that it
accepts. `launch_all` runs the launchers; under `launch_form.recording` nothing is compiled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch

from sglang.ledger.launch_form import named, recording
from sglang.ledger.variant import Variant
from sglang.srt.blocks.block_selection.kernels.block_scores import block_scores
from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.compressed.kernels import compressor, tail_rotation
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gated_streams.kernels import gated_streams
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.gqa.kernels import whole_norm
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.hyper_connections.kernels import hyper_connection
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.kimi_delta.kernels import channel_recurrence
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.mla.kernels import latent_pack, latent_prompt, latent_store
from sglang.srt.blocks.mla.spec import MLA, Indexer
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.kernels import topk
from sglang.srt.blocks.moe.spec import MoE, Router
from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding
from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.kernels.selected_blocks import selected_block_attention_fwd
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.recurrent_state.kernels import causal_conv, gated_norm, recurrence
from sglang.srt.blocks.recurrent_state.rule import Rule, gated_delta_rule, kimi_delta_rule
from sglang.srt.blocks.recurrent_state.step_kernels import StepKernels, VerifiedRows
from sglang.srt.blocks.shared_sparse.spec import SharedSparse
from sglang.srt.blocks.short_convolution.kernels import short_convolution
from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme, expert_share, wants_planes
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.conditions import MIXED_ROWS
from sglang.srt.kernels.ledger_file import DEQUANTIZED_TAIL, SAME_LAUNCHES, judged_as
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.kernels.tile_configs import config_for
from sglang.srt.kernels.tiles import AttentionTile, attention_tiles, fp4_head_dims
from sglang.srt.layers.attention.latent_chunks import LatentChunk
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.attention.triton_ops.block_attention import block_attention_fwd
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_fwd
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_biased import extend_biased_fwd
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_fwd
from sglang.srt.layers.attention.triton_ops.index_logits import index_logits
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd
from sglang.srt.layers.attention.triton_ops.prefix_parts import WHOLE, PrefixParts
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.attention.triton_ops.sparse_attention import sparse_attention_fwd
from sglang.srt.layers.attention.triton_ops.sparse_packed import PACKED_BYTES
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.moe import mixed_moe
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights
from sglang.srt.layers.moe.fused_moe_triton import config_files
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as moe
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.expert_tile_configs import TALL_ROWS, mixed_from
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, last_resort, tile_rows
from sglang.srt.layers.quantization.activations import RowForm
from sglang.srt.layers.quantization.linear_weight import LinearWeight, held_scheme
from sglang.srt.layers.triton_ops import (
    activation,
    decode_inputs,
    draft_rows,
    embedding,
    gemv,
    index_rope,
    index_store,
    keep_last,
    linear_products,
    linear_tiles,
    ngram,
    norm,
    norm_quantize,
    part_rows,
    quantized_sums,
    rope_store,
    sampling,
    skinny_gemm,
)
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.attention_parts import ElementGate, HeadGate, PerHead, Whole
from sglang.srt.plan.layer_spec import Absent, AttentionShape, FeedForward, LayerSpec
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.sampling.sampling_table import ROW_WIDTH

from ..layers.moe.moe_harness import tile_configs_of
from .published import LAYOUTS, accepted_layouts, described

BF16 = torch.bfloat16
CACHES = ("bfloat16", "fp8_e4m3", "fp8_e5m2")
FP4 = "fp4_e2m1"
CACHE_NAMES = ("k_cache", "v_cache")
SEEING_THEMSELVES = ("Gemma4ForConditionalGeneration",)
"""Models whose images see themselves both ways in layers with a window."""
OWN_FORMAT_OF_BIASES = "mxfp4"
MANY = 4096
"""Tokens of one step: for the largest tiles, and for the way of grouping that takes several launches."""
CONTEXT = 32_768
SLOTS = 65_536
REQUESTS = 64


_find_files = config_files.files


@functools.cache
def _tuning_files(root: Path) -> list[Path]:
    return list(_find_files(root))


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tiles_of(op: str, dim: int, v_dim: int, kv_dtype: str, arch: ArchTraits, group: int = 0) -> Iterator[AttentionTile]:
    """Every tile that the table has. What is launched meanwhile is found by its tile."""
    for rank, tile in enumerate(attention_tiles(op, dim, v_dim, kv_dtype, arch.features, group)):
        with named(op, f"{dim}x{v_dim}", "bfloat16", kv_dtype, tile=tile, default=rank == 0):
            yield tile


def of_scheme(op: str, scheme: Scheme | None, arch: ArchTraits) -> AbstractContextManager[None]:
    """Names launches of weights in this format."""
    if scheme is None:
        return named(op, "bf16")
    stands_for = SAME_LAUNCHES.get(scheme.name, scheme.name)
    native = product_of(SCHEMES[stands_for], arch_by_name(judged_as(arch)).features)
    other = product_of(scheme, arch.features).kind != native.kind
    return named(op, stands_for, *([DEQUANTIZED_TAIL.strip("/")] if other else []))


def each_once(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher whose calls with the same objects and tensors of the same sizes launch the same: the first one does,
    and the others have what it returned."""
    results: dict[tuple[object, ...], Any] = {}

    def run(*given: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else id(x) for x in given)
        if key not in results:
            results[key] = given, launcher(*given)
        return results[key][1]

    return run


def launch_published(arch: ArchTraits, done: set[object]) -> None:
    """Everything that can be launched for all of them."""
    for model, tp_size in models():
        launch_all(model, tp_size, arch, done)


def models(names: Sequence[str] = (), layouts: Sequence[int] = LAYOUTS) -> Iterator[tuple[ModelDescription, int]]:
    """Every model (or those named) with every number of ranks that a server accepts for it in some number format."""
    for _, model in described(names):
        for tp_size in accepted_layouts(model, layouts):
            yield model, tp_size


def alike(size: int) -> int:
    """The size below 4,096 for which tiles are launched as they are for `size`: of widths of matrices they depend on
    what divides them, and on what divides the number of their groups of 128 columns."""
    return size if size < 2048 else 2048 + size % 2048


def launch_all(
    model: ModelDescription,
    tp_size: int,
    arch: ArchTraits,
    done: set[object],
    alike: Callable[[int], int] = alike,
) -> None:
    """Everything that a rank can launch, with caches and weights of every format. `done`: what was launched with the
    same sizes before, for other models; it is not launched again, nor with others that are `alike` to its launches."""

    def once(part: Callable[..., None], *sizes: object) -> None:
        if (part, sizes) not in done:
            done.add((part, sizes))
            part(*sizes)

    once(_decode_inputs)
    once(_draft_rows)
    once(_ngram_drafts)
    once(_embedding_rows, -(-model.vocab_size // tp_size), model.hidden_size)
    once(_norms, model.hidden_size, model.zero_centred_norms)
    for layer in dict.fromkeys(model.layers):
        kind = type(layer.mixer)
        assert kind in _MIXERS, f"_MIXERS in test/srt/kernels/census.py has no function that launches {kind.__name__}"
        once(_MIXERS[kind], layer.mixer, tp_size, arch)
        if isinstance(layer.mixer, MLA) or (isinstance(layer.mixer, GQA) and layer.mixer.caches_tokens):
            for dcp_size in (size for size in range(2, tp_size + 1) if tp_size % size == 0):
                shape = layer.mixer.attention_shape(tp_size)
                once(
                    _parts_of_ranks,
                    shape.num_heads,
                    shape.v_head_dim,
                    layer.mixer.effective_dcp_size(tp_size, dcp_size),
                )
        if isinstance(layer.mixer, GQA) and layer.mixer.window and model.architecture in SEEING_THEMSELVES:
            once(_images_both_ways, layer.mixer.attention_shape(tp_size), layer.mixer.window, arch)
        for block in layer.token_blocks:
            _feed_forward(once, block, model.hidden_size, tp_size, arch, alike)
        if isinstance(layer.residual, HyperConnections):
            once(_hyper_connections, layer.residual, model.hidden_size)
        if isinstance(layer.residual, GatedStreams):
            once(_gated_streams, layer.residual.streams, layer.residual.rank, model.hidden_size)
        if layer.convolution is not None:
            once(_block_convolution, layer.convolution)
        if isinstance(layer.ngrams, Engram):
            once(_engram, layer.ngrams, tp_size)
        elif isinstance(layer.ngrams, NgramEmbedding):
            once(_ngrams, layer.ngrams, tp_size)
        whole, share = _matrices(layer, model.hidden_size, 1), _matrices(layer, model.hidden_size, tp_size)
        for matrix, of_all in zip(share, whole, strict=True):
            _dense_product(once, matrix, matrix.cols < of_all.cols, arch, alike)
    once(_gemv, -(-model.vocab_size // tp_size), model.hidden_size, False, torch.float32)
    once(_quantized_head, -(-model.vocab_size // tp_size), model.hidden_size, arch)
    once(_image_encoder, model.vision_head_dim, arch)
    once(_sampling, model.vocab_size)
    if tp_size > 1:
        once(_quantized_sums, model.hidden_size, tp_size)


def _quantized_sums(hidden: int, ranks: int) -> None:
    """Sums over all ranks, whose shares begin on 16 bytes, and the halves of sums that attention groups exchange."""
    codec = quantized_sums.TritonCodec()
    for rows, aligned in itertools.product((1, 100), (True, False)):
        x = empty(rows, hidden).flatten()
        share = -(-x.numel() // (quantized_sums.SIZE * ranks))
        share = -(-share // 16) * 16 if aligned else share
        messages, total = (empty(parts, share * 33, dtype=torch.uint8) for parts in (ranks, 1))
        codec.encode(x, messages)
        codec.decode(messages, x)
        codec.add_encoded(messages, total)
        codec.add(messages, empty(share * quantized_sums.SIZE))


def _feed_forward(
    once: Callable[..., None],
    block: FeedForward,
    hidden: int,
    tp_size: int,
    arch: ArchTraits,
    alike: Callable[[int], int],
) -> None:
    if isinstance(block, Dense):
        once(_gate, block.activation, block.padded_rows(tp_size))
    elif isinstance(block, PerLayerEmbedding):
        once(_gate, block.activation, block.size)
    elif isinstance(block, MoE):
        once(_routing, block.router, block.num_experts, block.fused_shared, block.vocab_size)
        if block.shared is not None and not block.fused_shared:
            once(_gate, block.activation, block.shared.dense(block.activation).padded_rows(tp_size))
        for experts, choices, width, inter, *format in _expert_layers(block, hidden, tp_size):
            once(_experts, experts, choices, width, inter, *format, block.activation, block.bias, arch)
            sizes = min(choices, 2), alike(width), alike(inter)
            once(_expert_tiles, *sizes, *format, block.activation, block.bias, arch)


def _matrices(layer: LayerSpec, hidden: int, tp_size: int) -> list[Matrix]:
    """Of one rank, without experts: the shares of others do not depend on theirs."""
    weights = layer.weights(hidden, RankLayout(tp_size), 1)
    return [part for part in weights if isinstance(part, Matrix) and not part.experts and part.dtype is None]


def _dense_product(
    once: Callable[..., None], matrix: Matrix, cut: bool, arch: ArchTraits, alike: Callable[[int], int]
) -> None:
    """`cut`: ranks share its columns."""
    once(_gemv, matrix.rows, matrix.cols, matrix.bias, None)
    if matrix.name == "moe.router":
        once(_gemv, matrix.rows, matrix.cols, matrix.bias, torch.float32)
    if matrix.quantized:
        for scheme in SCHEMES.values():
            if cut and scheme.group[1] and matrix.cols % scheme.group[1]:
                continue  # refused: a rank would have a part of what has one scale
            for static in (False, True) if scheme.activation == "tensor" else (scheme.activation == "nvfp4",):
                once(_products, _coarse(matrix.rows), matrix.cols, matrix.bias, scheme, static, arch)
                rows = 2048 + matrix.rows % 16
                once(_tall_products, rows, alike(matrix.cols), matrix.bias, scheme, static, arch)


def _coarse(rows: int) -> int:
    """With three leading bits, and what 16 leaves of it: launches of products depend on no more of their rows."""
    low = max(4, rows.bit_length() - 3)
    return (rows >> low << low) + rows % 16


def _decode_inputs() -> None:
    """Of models without a window and with two."""
    for tables, batch in itertools.product((1, 3), (1, 100)):
        slots, lens = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        next_tokens = empty(REQUESTS + 1, dtype=torch.int64)
        table = empty(tables, REQUESTS + 1, CONTEXT, dtype=torch.int32)
        decode_inputs.decode_inputs(slots, lens, empty(batch, dtype=torch.int64), next_tokens, table)


def _draft_rows() -> None:
    """Of models without a window and with two."""
    for tables, batch in itertools.product((1, 3), (1, 100)):
        slots, lens = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        computed = empty(REQUESTS + 1, dtype=torch.int32)
        next_tokens = empty(REQUESTS + 1, 4, dtype=torch.int64)
        table = empty(tables, REQUESTS + 1, CONTEXT, dtype=torch.int32)
        for width in (1, 4):
            draft_rows.verify_inputs(slots, lens, computed, next_tokens, table, width)
            draft_rows.draft_inputs(slots, lens, lens, table, width)
            rows = empty(batch, width, dtype=torch.int64)
            draft_rows.accept_drafts(rows, slots, lens, next_tokens, computed)
    draft_rows.accept_drafts(rows, slots, lens, next_tokens, computed, lens)


def _ngram_drafts() -> None:
    """With and without external texts, for short and long contexts."""
    texts = empty(1000, dtype=torch.int32), empty(1000, dtype=torch.int32), empty(1, dtype=torch.int32)
    for context, longest, corpus in itertools.product((1000, CONTEXT, 1 << 20), (1, 64), (None, texts)):
        history = empty(REQUESTS + 1, context, dtype=torch.int32)
        slots, lens = empty(3, dtype=torch.int64), empty(3, dtype=torch.int32)
        ngram.ngram_drafts(history, slots, lens, slots, longest, 5, corpus)


def _embedding_rows(rows: int, hidden: int) -> None:
    for tokens, first in ((1, 0), (100, rows)):
        embedding.embedding_rows(empty(tokens, dtype=torch.int64), empty(rows, hidden), first)


def _norms(hidden: int, zero_centred: bool) -> None:
    """Weights that checkpoints store minus 1 are kept in fp32."""
    weight = empty(hidden, dtype=torch.float32 if zero_centred else BF16)
    for tokens in (1, 100):
        norm.rmsnorm(empty(tokens, hidden), weight, 1e-6)
        norm.fused_add_rmsnorm(empty(tokens, hidden), empty(tokens, hidden), weight, 1e-6)
    for form in get_args(RowForm):
        norm_quantize.add_rmsnorm_quantize(empty(100, hidden), empty(100, hidden), weight, 1e-6, form)


def _gate(function: Activation, inter: int) -> None:
    for tokens in (1, 100):
        activation.activate(empty(tokens, (1 + function.gated) * inter), function)


def _grouped_query(mixer: GQA, tp_size: int, arch: ArchTraits) -> None:
    shape = mixer.attention_shape(tp_size)
    if mixer.caches_tokens and shape.head_dim == shape.v_head_dim:  # the kernel refuses others, which torch serves
        _rope_store(shape, mixer)
    if isinstance(mixer.qk_norm, Whole):
        _whole_norm(shape)
    mask, softmax = mixer.mask, mixer.softmax
    _attention(shape, mask.window, softmax.logit_cap, softmax.sinks, arch, mask.chunked, extent=softmax.extent)
    if mixer.kv_convolution is not None:
        width = shape.num_heads * shape.head_dim
        channels = mixer.kv_channels(tp_size)
        _convolution(mixer.kv_convolution.taps, empty(100, width + channels)[:, width:])
    if isinstance(mixer.gate, HeadGate):
        width = shape.num_heads * shape.head_dim
        gated_norm.attention_head_gate(empty(8, width), empty(8, shape.num_heads))
    if mixer.indexer is not None:
        _block_sparse(shape, mixer.indexer, mixer.rotary_dim, arch)
    if isinstance(mixer.gate, ElementGate):
        width = shape.num_heads * shape.head_dim
        gated_norm.attention_output_gate(empty(8, width), empty(8, 2 * width)[:, width:])


def _block_sparse(shape: AttentionShape, indexer: BlockIndexer, rot: int, arch: ArchTraits) -> None:
    """Index keys and their queries, scores and choices of blocks, and attention to them, of one token and of many."""
    heads, dim, block, chosen = shape.num_kv_heads, indexer.head_dim, indexer.block, indexer.top_blocks
    keys, weight = empty(SLOTS, 1, dim), empty(dim, dtype=torch.float32)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for tokens, run in itertools.product((1, 100, 300), (1, 2, 8, 1000)):
        positions = empty(tokens, dtype=torch.int64)
        q, _, _ = rope_store.qk_norm_rope_store(
            empty(tokens, (heads + 1) * dim), positions, empty(CONTEXT, rot, dtype=torch.float32), weight, weight, 1e-6,
            heads, 1, dim, keys, None, positions,
        )  # fmt: skip
        rows = EntryRows(table, positions, empty(tokens, dtype=torch.int32), CONTEXT, run=run)
        blocks = rows.blocks(block, heads)
        scores = empty(tokens, heads, -(-blocks.max_count // 16) * 16, dtype=torch.float32)
        for tile in tiles_of("block_indexer", dim, dim, "bfloat16", arch):
            block_scores(q, keys, rows, block, chosen, indexer.local_blocks, scores, tile=tile, num_sms=arch.num_sms)
        selection = Selection(empty(tokens * heads, chosen, dtype=torch.int32), blocks.counts)
        select_entries(scores.flatten(0, 1), blocks, chosen, selection.slots, selection.counts)
        for dtype in CACHES:
            k, v = (empty(SLOTS, heads, shape.head_dim, dtype=STORAGE_DTYPES[dtype]) for _ in "kv")
            queries = empty(tokens, shape.num_heads, shape.head_dim)
            for tile in tiles_of("block_attention", shape.head_dim, shape.v_head_dim, dtype, arch):
                for sms in (1, 188):
                    block_attention_fwd(
                        queries, k, v, selection, rows.counts, block, empty(*queries.shape), scale=0.1, tile=tile,
                        num_sms=sms,
                    )  # fmt: skip


def _whole_norm(shape: AttentionShape) -> None:
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for reduce in (None, lambda sums: sums):
        whole_norm.qk_whole_norm(empty(8, q + 2 * k), empty(q), empty(k), 1e-6, (q, k), 1, reduce)


def _rope_store(shape: AttentionShape, mixer: GQA) -> None:
    norm, weight = mixer.qk_norm, None
    if isinstance(norm, PerHead):
        weight = empty(shape.head_dim, dtype=torch.float32 if norm.fp32 else BF16)
    rope_stores(shape, mixer.rotary_dim, weight, mixer.rope.is_neox_style)


def rope_stores(shape: AttentionShape, rotary_dim: int, weight: torch.Tensor | None, is_neox_style: bool) -> None:
    """Stores into caches of every type. weight: of the norms of heads."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    caches = [
        {name: empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype]) for name in CACHE_NAMES} for dtype in CACHES
    ]
    if (dim, dim) in fp4_head_dims():
        caches.append(fp4_caches(shape))
    for stored, tokens in itertools.product(caches, (1, 100, 300)):
        rope_store.qk_norm_rope_store(
            empty(tokens, (heads + 2 * kv_heads) * dim), empty(tokens, dtype=torch.int64),
            empty(CONTEXT, rotary_dim, dtype=torch.float32), weight, weight, 1e-6, heads, kv_heads, dim,
            out_cache_loc=empty(tokens, dtype=torch.int64), is_neox_style=is_neox_style, **stored,
        )  # fmt: skip


def _attention(
    shape: AttentionShape,
    window: int,
    cap: float,
    sinks: bool,
    arch: ArchTraits,
    chunked: bool = False,
    latent: bool = False,
    extent: int = 0,
) -> None:
    """`latent`: the values are the first columns of the keys. `extent`: of biases by distance, 0: there are none."""
    heads, kv_heads, dim, v_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    sink = empty(heads, dtype=torch.float32) if sinks else None
    layer: dict[str, Any] = {"logit_cap": cap, "sinks": sink, "sliding_window": window, "chunked": chunked}
    prompts, decodes = extend_attention_fwd, decode_attention_fwd
    if extent:
        prompts, decodes = extend_biased_fwd, decode_biased_fwd
        layer = {"sliding_window": window, "bias": empty(100, heads, extent)}
    elif not latent:
        _fp4_attention(shape, layer, arch)
    starts = empty(9, dtype=torch.int32)
    in_one = (dim, v_dim) in WHOLE or layer.get("sliding_window")
    shared = [] if in_one else [PrefixParts.allocate(3, 100, starts[:1], heads, v_dim)]
    for dtype in CACHES:
        k_cache = empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype])
        # Tensors without memory begin at the address 0: one that is no part of the keys begins behind it.
        values = empty(SLOTS + 1, kv_heads, v_dim, dtype=STORAGE_DTYPES[dtype])[int(dim != v_dim) :]
        v_cache = k_cache[..., :v_dim] if latent else values
        table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
        slots, lens = empty(8, dtype=torch.int64), empty(8, dtype=torch.int32)
        # As the projection leaves them: three parts of one row.
        widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
        rows = empty(100, sum(widths)).split(widths, -1)
        q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip(rows, (dim, dim, v_dim), strict=True))
        if latent:
            q, k = empty(100, heads, dim), empty(100, kv_heads, dim)
            v = k[..., :v_dim]
        for tile in tiles_of("extend_attention", dim, v_dim, dtype, arch):
            for prefix, parts in ((False, None), *((True, each) for each in (None, *shared))):
                prompts(
                    q, k, v, empty(100, heads, v_dim), k_cache, v_cache, table, slots, lens, starts, scale=0.1,
                    tile=tile, has_prefix=prefix, parts=parts, **layer,
                )  # fmt: skip
        # No model caps scores of latents, and the kernel that decodes them does not.
        for tile in tiles_of("decode_attention", dim, v_dim, dtype, arch) if not (latent and cap) else ():
            for tokens in (1, 4):  # of each request: one, or draft tokens
                workspace = DecodeWorkspace.allocate(64, tokens * heads, kv_heads, v_dim, arch.num_sms, tile, "meta")
                plan = plan_decode(lens, workspace, tile)
                decodes(
                    q[: 8 * tokens], empty(8 * tokens, heads, v_dim), k_cache, v_cache, table, slots, lens, plan,
                    scale=0.1, tile=tile, prefix_lens=lens if tokens > 1 else None, **layer,
                )  # fmt: skip


def _block_convolution(spec: ShortConvolution) -> None:
    _convolution(spec.taps, empty(100, spec.channels))


def _convolution(taps: int, out: torch.Tensor) -> None:
    """Short convolutions of out's sizes, of one token and of all, whose rows may lie apart."""
    width = out.shape[1]
    kept, weight = empty(REQUESTS, taps - 1, width), empty(width, taps)
    for tokens in (1, len(out)):
        at = empty(tokens, dtype=torch.int64)
        requests, rows = TokenRequests(at, at, at, at), empty(tokens, width)
        short_convolution.convolve(rows, weight, kept, requests, out[:tokens])
        keep_last.keep_last(rows, kept, requests)


def fp4_caches(shape: AttentionShape) -> dict[str, torch.Tensor]:
    """Codes and scales of keys and values, as arguments of kernels."""
    sizes = {"k_cache": shape.head_dim // 2, "v_cache": shape.v_head_dim // 2}
    sizes |= {"k_group_scales": shape.head_dim // 16, "v_group_scales": shape.v_head_dim // 16}
    return {name: empty(SLOTS, shape.num_kv_heads, size, dtype=torch.uint8) for name, size in sizes.items()}


def _fp4_attention(shape: AttentionShape, layer: dict[str, Any], arch: ArchTraits, causal: bool = True) -> None:
    heads, kv_heads, dim, v_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
    parts = empty(100, sum(widths)).split(widths, -1)
    q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip(parts, (dim, dim, v_dim), strict=True))
    if not causal:
        q, k, v = (x.contiguous() for x in (q, k, v))
    caches, lens = fp4_caches(shape), empty(8, dtype=torch.int32)
    rows = {"req_to_token": empty(REQUESTS + 1, CONTEXT, dtype=torch.int32), "scale": 0.1, **layer, **caches}
    rows["req_pool_indices"] = empty(8, dtype=torch.int64)
    for tile in tiles_of("extend_attention", dim, v_dim, FP4, arch):
        extend_fp4_fwd(
            q, k, v, empty(100, heads, v_dim), prefix_lens=lens, start_loc=empty(9, dtype=torch.int32), tile=tile,
            causal=causal, **rows,
        )  # fmt: skip
    for tile in tiles_of("decode_attention", dim, v_dim, FP4, arch) if causal else ():
        for tokens in (1, 4):
            workspace = DecodeWorkspace.allocate(64, tokens * heads, kv_heads, v_dim, arch.num_sms, tile, "meta")
            plan = plan_decode(lens, workspace, tile)
            decode_fp4_fwd(
                q[: 8 * tokens], empty(8 * tokens, heads, v_dim), seq_lens=lens, plan=plan, tile=tile,
                prefix_lens=lens if tokens > 1 else None, **rows,
            )  # fmt: skip


def _images_both_ways(shape: AttentionShape, window: int, arch: ArchTraits) -> None:
    """Rows of the step that are gathered, so that nothing lies between them."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    _fp4_attention(shape, {"sliding_window": window}, arch, causal=False)
    for dtype in CACHES:
        cache = [empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype]) for _ in "kv"]
        q, k, v = (empty(100, count, dim) for count in (heads, kv_heads, kv_heads))
        table, slots = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32), empty(8, dtype=torch.int64)
        for tile in tiles_of("extend_attention", dim, dim, dtype, arch):
            for prefix in (True, False):
                extend_attention_fwd(
                    q, k, v, empty(100, heads, dim), *cache, table, slots, empty(8, dtype=torch.int32),
                    empty(9, dtype=torch.int32), scale=0.1, tile=tile, has_prefix=prefix, causal=False,
                    sliding_window=window,
                )  # fmt: skip


def _latent(mixer: MLA, tp_size: int, arch: ArchTraits) -> None:
    """Absorbed attention, the store, and prompts over the prefixes of two requests in two chunks each."""
    shape = mixer.attention_shape(tp_size)
    _attention(shape, 0, 0.0, False, arch, latent=True)
    if mixer.sparse:
        for dtype, width, stored in (("bfloat16", shape.head_dim, BF16), ("fp8_e4m3", PACKED_BYTES, torch.uint8)):
            cache = empty(SLOTS, 1, width, dtype=stored)
            _selected(shape, [(cache, selected(2048))], False, dtype, arch)
        latent_pack.latent_pack_store(empty(100, shape.head_dim), cache, empty(100, dtype=torch.int64))
    if mixer.indexer is not None:
        _indexer(mixer.indexer, 1, arch)
        _index_rows(mixer.indexer, mixer.rope_dim)
    heads, dim, rank, rot = shape.num_heads, mixer.latent_dim, mixer.kv_lora_rank, mixer.rope_dim
    head_dim, v_dim = prompt = (mixer.qk_dim, mixer.v_dim)
    # The latent is a part of the product that makes q's latent too, or queries.
    before = mixer.q_lora_rank or heads * head_dim
    if mixer.q_lora_rank:
        for tokens in (1, 100):
            norm.rmsnorm(empty(tokens, before + dim)[:, :before], empty(before), 1e-6)
    w_uk, w_uv = empty(heads, head_dim - rot, rank), empty(heads, rank, v_dim)
    cos_sin = empty(CONTEXT, rot, dtype=torch.float32)
    bounds = empty(3, dtype=torch.int32)
    for dtype, is_neox_style in itertools.product(CACHES, (False, True)):
        cache = empty(SLOTS, 1, dim, dtype=STORAGE_DTYPES[dtype])
        for tokens, absorbed in ((1, 1), (100, None), (300, 16)):
            latents, positions = empty(tokens, before + dim)[:, before:], empty(tokens, dtype=torch.int64)
            queries = empty(tokens, heads, head_dim)
            if not mixer.q_lora_rank:
                queries = empty(tokens, before + dim)[:, :before].unflatten(-1, (heads, head_dim))
            entries = latent_store.latent_norm_rope_store(
                queries, latents, None if absorbed is None else empty(absorbed, heads, dim), positions, cos_sin,
                empty(rank), 1e-6, cache, positions, 1.0, is_neox_style,
            )  # fmt: skip
        chunks = [LatentChunk(empty(64, dtype=torch.int64), bounds)] * 2
        for tile in tiles_of("latent_prompt_attention", *prompt, "bfloat16", arch):
            for prefix in ([], chunks):
                out = empty(tokens, heads, v_dim)
                latent_prompt.latent_prompt_attention(
                    queries, entries, w_uk, w_uv, out, bounds, cache, prefix, scale=0.1, tile=tile
                )


def _parts_of_ranks(heads: int, v_head_dim: int, ranks: int) -> None:
    """What ranks that share out tokens exchange, merged with sinks and without."""
    for tokens in (1, 100) if ranks > 1 else ():
        parts = empty(tokens, ranks * heads, v_head_dim)
        received = part_rows.pack_parts(parts, empty(tokens, ranks * heads, dtype=torch.float32), ranks)
        for sinks in (None, empty(heads, dtype=torch.float32)):
            part_rows.merge_parts(received, sinks, empty(tokens, heads, v_head_dim))


def _compressed_sparse(mixer: CompressedSparse, tp_size: int, arch: ArchTraits) -> None:
    """A window alone, or with compressed entries."""
    shape = AttentionShape(mixer.num_heads // tp_size, 1, mixer.head_dim, mixer.head_dim)
    cache = empty(SLOTS, 1, shape.head_dim)
    _shared_rows(shape, mixer, cache)
    if mixer.rate:
        _compressors(mixer)
    more = [(cache, selected(64))] if mixer.rate else []
    _selected(shape, [(cache, selected(mixer.window)), *more], True, "bfloat16", arch)
    if mixer.indexer is not None:
        _indexer(mixer.indexer, mixer.rate, arch)


def _shared_sparse(mixer: SharedSparse, tp_size: int, arch: ArchTraits) -> None:
    """A window and entries that this layer or an earlier one made; runs of entries have the same scores."""
    shape = AttentionShape(mixer.num_heads // tp_size, 1, mixer.head_dim, mixer.head_dim)
    cache = empty(SLOTS, 1, shape.head_dim)
    _shared_rows(shape, mixer, cache)
    tail_rotation.shared_kv_norm_rope_store(
        empty(100, 0, shape.head_dim), empty(100, shape.head_dim), empty(100, dtype=torch.int64),
        empty(CONTEXT, mixer.rope_dim, dtype=torch.float32), empty(shape.head_dim), 1e-6, cache,
        empty(100, dtype=torch.int64),
    )  # fmt: skip
    _selected(shape, [(cache, selected(mixer.window)), (cache, selected(64))], True, "bfloat16", arch)
    if mixer.indexer is not None:
        _indexer(mixer.indexer, mixer.rate, arch)
    if mixer.makes and mixer.indexer is not None:
        _entries(mixer, mixer.indexer.head_dim)


def _entries(mixer: SharedSparse, index_dim: int) -> None:
    """Entries of a run, normed and as they are, and entries and keys that are made of a token each."""
    cos_sin, at = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32), empty(100, dtype=torch.int64)
    for rate, dim in ((mixer.rate, mixer.head_dim), (1, mixer.head_dim), (1, index_dim)):
        rows, state = (empty(*shape, dtype=torch.float32) for shape in ((100, 2, dim), (REQUESTS, rate, 2, dim)))
        bias, cache = empty(rate, dim, dtype=torch.float32), empty(SLOTS // rate, 1, dim)
        compressor.compress(rows, bias, state, at, at, at, empty(dim), 1e-6, cos_sin, cache, at)
        if rate > 1:
            compressor.compress(rows, bias, state, at, at, at, None, 0.0, None, cache, at)
            compressor.keep(rows, state, at, at, at)


def _shared_rows(shape: AttentionShape, mixer: CompressedSparse, cache: torch.Tensor) -> None:
    """Norms, rotations and the store, of attention's heads and of the indexer's."""
    cos_sin = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32)
    for tokens in (1, 100, 300):
        q, row = empty(tokens, shape.num_heads, shape.head_dim), empty(tokens, shape.head_dim)
        at, weight = empty(tokens, dtype=torch.int64), empty(shape.head_dim)
        tail_rotation.shared_kv_norm_rope_store(q, row, at, cos_sin, weight, 1e-6, cache, at)
        tail_rotation.tail_rotation(q, at, cos_sin, inverse=True)
        if mixer.indexer is not None:
            tail_rotation.tail_rotation(empty(tokens, mixer.indexer.num_heads, mixer.indexer.head_dim), at, cos_sin)


def _compressors(mixer: CompressedSparse) -> None:
    cos_sin = empty(CONTEXT, mixer.rope_dim, dtype=torch.float32)
    for dim in (mixer.head_dim, *([mixer.indexer.head_dim] if mixer.indexer is not None else [])):
        width, of_tokens = mixer.overlap * dim, {"dtype": torch.int64}
        state = empty(REQUESTS, mixer.overlap * mixer.rate, 2, width, dtype=torch.float32)
        for tokens in (1, 100):
            rows, at = empty(tokens, 2, width, dtype=torch.float32), empty(tokens, **of_tokens)
            bias = empty(mixer.rate, width, dtype=torch.float32)
            cache = empty(SLOTS // mixer.rate, 1, dim)
            compressor.compress(rows, bias, state, at, at, at, empty(dim), 1e-6, cos_sin, cache, at)
            compressor.keep(rows, state, at, at, at)


def _pooled_sparse(mixer: PooledSparse, tp_size: int, arch: ArchTraits) -> None:
    """The heads' store and gate, the indexer's keys, queries and choice, and attention to what it selects."""
    heads, index, tokens = mixer.heads, mixer.indexer, 100
    shape = heads.attention_shape(tp_size)
    _rope_store(shape, heads)
    width, dim = shape.num_heads * shape.head_dim, index.head_dim
    gated_norm.attention_output_gate(empty(8, width), empty(8, 2 * width)[:, width:])
    at, cos_sin = empty(tokens, dtype=torch.int64), empty(CONTEXT, heads.rotary_dim, dtype=torch.float32)
    weight, rows = empty(dim, dtype=torch.float32), empty(tokens, 2, dim, dtype=torch.float32)
    keys, state = empty(SLOTS // mixer.block, 1, dim), empty(REQUESTS, mixer.block, 2, dim, dtype=torch.float32)
    compressor.compress(rows, None, state, at, at, at, weight, 1e-6, None, keys, at, angles=heads.rotary_dim)
    compressor.keep(rows, state, at, at, at)
    q = norm.rmsnorm(empty(tokens, index.num_heads, dim), weight, 1e-6)
    tail_rotation.tail_rotation(q, at, cos_sin)
    counts, slots = empty(tokens, dtype=torch.int32), empty(tokens, index.top_k, dtype=torch.int32)
    table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    for run in (1, 1000):
        entries = EntryRows(table, at, counts, CONTEXT // mixer.block, mixer.block, run)
        logits, scores = (empty(tokens, wide, dtype=torch.float32) for wide in (entries.max_count, index.num_heads))
        for tile in tiles_of("sparse_indexer", dim, dim, "bfloat16", arch):
            index_logits(q, scores, keys, None, entries, index.top_k, logits, tile=tile, num_sms=arch.num_sms)
        select_entries(logits, entries, index.top_k, slots, counts)
    chosen = BlockSelection(slots, counts, counts, counts, mixer.block)
    queries, k_cache = empty(tokens, shape.num_heads, shape.head_dim), empty(SLOTS, shape.num_kv_heads, shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    for tile in tiles_of("selected_block_attention", shape.head_dim, shape.v_head_dim, "bfloat16", arch, group):
        for some in (1, tokens):
            part = BlockSelection(*(x[:some] for x in (slots, counts, counts, counts)), chosen.block)
            selected_block_attention_fwd(
                queries[:some], k_cache, k_cache, part, empty(some, *queries.shape[1:]), scale=0.1, tile=tile,
                num_sms=arch.num_sms,
            )  # fmt: skip


def _pooled_latent(mixer: PooledLatent, tp_size: int, arch: ArchTraits) -> None:
    """The latents' store, the indexer's keys, queries and choice, and attention to tokens of what it selects and to
    those behind."""
    rank, index, rot = mixer.heads.kv_lora_rank, mixer.indexer, mixer.rope.rot_dim
    shape = AttentionShape(mixer.shares(tp_size).padded_heads, 1, rank, rank)
    cache, cos_sin = empty(SLOTS, 1, rank), empty(1, rot, dtype=torch.float32)
    before = mixer.heads.q_lora_rank
    for tokens in (1, 100, 300):
        joined, at = empty(tokens, before + rank), empty(tokens, dtype=torch.int64)
        norm.rmsnorm(joined[:, :before], empty(before), 1e-6)
        none, latents, weight = empty(tokens, 0, rank), joined[:, before:], empty(rank)
        tail_rotation.shared_kv_norm_rope_store(none, latents, at, cos_sin, weight, 1e-6, cache, at)
        norms = [empty(index.head_dim, dtype=torch.float32)] * 2
        index_rope.index_norm_rope(empty(tokens, index.head_dim), None, 0, at, cos_sin, *norms, 1e-6)
        rows = empty(tokens, 2, index.head_dim, dtype=torch.float32)
        bias = rows.new_empty(mixer.block, index.head_dim)
        state = rows.new_empty(REQUESTS, mixer.block, *rows.shape[1:])
        keys = empty(SLOTS // mixer.block, 1, index.head_dim)
        compressor.compress(rows, bias, state, at, at, at, None, 0.0, None, keys, at)
        compressor.keep(rows, state, at, at, at)
    _selected(shape, [(cache, selected(64)), (cache, selected(mixer.block - 1))], False, "bfloat16", arch)
    _indexer(index, mixer.block, arch)


def _gated_streams(streams: int, rank: int, hidden: int) -> None:
    """Before the first block, between blocks, and behind the last one."""
    for tokens in (1, 100):
        x, weight = empty(tokens, streams, hidden), empty(streams, hidden, dtype=torch.float32)
        for placed in (None, empty(tokens, streams, dtype=torch.float32)):
            out = None if placed is None else empty(tokens, hidden)
            gated_streams.place_and_norm(x, out, placed, weight, 1e-6)
        for width in (rank + streams, rank):
            gated_streams.bend(empty(tokens, width), rank, streams)
        gated_streams.mix_streams(empty(tokens, streams * hidden), x)
        norm.rmsnorm(empty(tokens, streams * hidden), empty(streams * hidden, dtype=torch.float32), 1e-6)  # of a draft


def _ngrams(spec: NgramEmbedding, tp_size: int) -> None:
    """Rows of tables in both types, and the values that go into the streams."""
    heads, size, width = spec.num_heads // tp_size, spec.stream_size, spec.streams * spec.stream_size
    numbers = empty(heads, dtype=torch.int64)
    hashed = NgramHash(empty(spec.longest, dtype=torch.int64), numbers, numbers, 0, spec.heads, spec.end_token)
    kept_ids = empty(REQUESTS, spec.longest - 1, dtype=torch.int32)
    kept_rows, norms = empty(REQUESTS, spec.kept_tokens, width), empty(spec.streams, size, dtype=torch.float32)
    for tokens in (1, 100):
        at = empty(tokens, dtype=torch.int64)
        requests = TokenRequests(at, at, at, at)
        for dtype, scale in ((BF16, None), (torch.float8_e4m3fn, empty(1, dtype=torch.float32))):
            table = empty(SLOTS, spec.dim, dtype=dtype)
            ngram_embedding.ngram_rows(at, kept_ids, requests, hashed, table, scale, empty(tokens, heads * spec.dim))
        streams = empty(tokens, spec.streams, size)
        values, normed = ngram_embedding.gate_values(empty(tokens, width + size), streams, norms, norms, norms, 1e-6)
        ngram_embedding.convolve_values(values, normed, empty(width, spec.taps), spec.longest, kept_rows, requests)
        keep_last.keep_last(at, kept_ids, requests)
        keep_last.keep_last(normed, kept_rows, requests)


def _engram(spec: Engram, tp_size: int) -> None:
    heads, size, width = spec.num_heads // tp_size, spec.stream_size, spec.streams * spec.stream_size
    numbers = empty(heads, dtype=torch.int64)
    hashed = NgramHash(empty(spec.longest, dtype=torch.int64), numbers, numbers, 0, spec.heads, spec.end_token, 0)
    kept = empty(REQUESTS, spec.longest - 1, dtype=torch.int32)
    norms = empty(spec.streams, size, dtype=torch.float32)
    for tokens in (1, 100):
        at = empty(tokens, dtype=torch.int64)
        requests = TokenRequests(at, at, at, at)
        table, scale = (
            empty(SLOTS, spec.dim, dtype=torch.float8_e4m3fn),
            empty(SLOTS, spec.dim // 32, dtype=torch.uint8),
        )
        ngram_embedding.ngram_rows(at, kept, requests, hashed, table, scale, empty(tokens, heads * spec.dim))
        keep_last.keep_last(at, kept, requests)
        streams = empty(tokens, spec.streams, size)
        ngram_embedding.gate_values(empty(tokens, width + size), streams, norms, norms, norms, 1e-6)


def _hyper_connections(spec: HyperConnections, hidden: int) -> None:
    """Before the first block, between blocks, and behind the last one."""
    streams = spec.streams
    for tokens in (1, 100, 1000, MANY):
        x, columns = empty(tokens, streams, hidden), streams + streams**2 + streams * spec.lagged
        placement = empty(tokens, columns, dtype=torch.float32)
        made, between = (empty(tokens, hidden), placement), streams * (2 + streams)
        forms = [(between, 3, (None, None)), (between, 3, made)]
        for outputs, pieces, before in (*forms, *([] if spec.lagged else [(streams, 1, made)])):
            matrix, base, scale = (
                empty(*shape, dtype=torch.float32) for shape in ((outputs, streams * hidden), (outputs,), (pieces,))
            )
            hyper_connection.hyper_connection(
                x, *before, matrix, base, scale, empty(hidden), 1e-6, 1e-6, 20, spec.lagged
            )


def selected(width: int, tokens: int = 100) -> Selection:
    return Selection(empty(tokens, width, dtype=torch.int32), empty(tokens, dtype=torch.int32))


def _selected(
    shape: AttentionShape, caches: list[tuple[torch.Tensor, Selection]], sinks: bool, dtype: str, arch: ArchTraits
) -> None:
    """Of prompts, and of batches of every size that is cut into shares."""
    sink = empty(shape.num_heads, dtype=torch.float32) if sinks else None
    for tile in tiles_of("sparse_attention", shape.head_dim, shape.v_head_dim, dtype, arch):
        for tokens in (1, 4, 8, 60, 1000):
            q, out = empty(tokens, shape.num_heads, shape.head_dim), empty(tokens, shape.num_heads, shape.v_head_dim)
            for lse in (None, empty(tokens, shape.num_heads, dtype=torch.float32)):
                sources = [(cache, selected(entries.slots.shape[1], tokens)) for cache, entries in caches]
                sparse_attention_fwd(q, sources, out, scale=0.1, tile=tile, num_sms=arch.num_sms, sinks=sink, lse=lse)


def _index_rows(indexer: Indexer, rot: int) -> None:
    """Keys with and without queries, of few tokens and of many."""
    dim, cos_sin = indexer.head_dim, empty(CONTEXT, rot, dtype=torch.float32)
    norm_row = empty(dim, dtype=torch.float32)
    for tokens, first, queries in ((1, 0, 1), (20, 4, 16), (100, 0, 100), (300, 0, 0), (300, 0, 300)):
        q = empty(queries, indexer.num_heads, dim) if queries else None
        positions = empty(tokens, dtype=torch.int64)
        index_rope.index_norm_rope(
            empty(tokens, dim), q, first, positions, cos_sin, norm_row, norm_row, 1e-6, indexer.is_neox_style
        )


def _indexer(indexer: Indexer, rate: int, arch: ArchTraits) -> None:
    """Its keys in both types, over caches with an entry for each `rate` tokens, of steps of one token and of many."""
    heads, dim = indexer.num_heads, indexer.head_dim
    for name, tokens in itertools.product(("bfloat16", "fp8_e4m3"), (1, 100)):
        dtype = STORAGE_DTYPES[name]
        cache = empty(SLOTS, 1, dim, dtype=dtype)
        scales = empty(SLOTS, 1, dtype=torch.float32) if name == "fp8_e4m3" else None
        index_store.index_key_store(empty(tokens, dim), cache, scales, empty(tokens, dtype=torch.int64))
        for kind in (BF16, torch.float32):
            q, weights = index_store.index_queries(
                empty(tokens, heads, dim), empty(tokens, heads, dtype=kind), 0.1, dtype
            )
        table, counts = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32), empty(tokens, dtype=torch.int32)
        slots = empty(tokens, indexer.top_k, dtype=torch.int32)
        for run in (1, 2, 4, 1000):
            rows = EntryRows(table, empty(tokens, dtype=torch.int64), counts, CONTEXT // rate, rate, run)
            logits = empty(tokens, rows.max_count, dtype=torch.float32)
            for tile in tiles_of("sparse_indexer", dim, dim, name, arch):
                index_logits(q, weights, cache, scales, rows, indexer.top_k, logits, tile=tile, num_sms=arch.num_sms)
            select_entries(logits, rows, indexer.top_k, slots, counts)


def _image_encoder(dim: int, arch: ArchTraits) -> None:
    for tile in tiles_of("prefill_attention", dim, dim, "bfloat16", arch):
        q, k, v, o = (empty(100, 16, dim) for _ in "qkvo")
        context_attention_fwd(q, k, v, o, empty(9, dtype=torch.int32), is_causal=False, tile=tile)


def _gated_delta(mixer: GatedDelta, tp_size: int, arch: ArchTraits) -> None:
    heads = (mixer.key_heads // tp_size, mixer.value_heads // tp_size, mixer.key_dim, mixer.value_dim)
    _recurrent(*heads, gated_delta_rule(mixer.key_dim), mixer.conv_kernel, False, arch)


def _mamba2(mixer: Mamba2, tp_size: int, arch: ArchTraits) -> None:
    heads = (mixer.num_groups // tp_size, mixer.num_heads // tp_size, mixer.state_dim, mixer.head_dim)
    _recurrent(*heads, Rule(delta=False), mixer.conv_kernel, mixer.conv_bias, arch)


def _kimi_delta(mixer: KimiDelta, tp_size: int, arch: ArchTraits) -> None:
    """With states of both types, with and without a bound of the decays."""
    heads, dim, width = mixer.num_heads // tp_size, mixer.head_dim, mixer.width(tp_size)
    conv = (empty(3 * width, mixer.conv_kernel), None, empty(REQUESTS + 1, mixer.conv_kernel - 1, 3 * width))
    slots, a_log = empty(8, dtype=torch.int64), empty(heads, dtype=torch.float32)
    ragged = (slots, slots, empty(8, dtype=torch.int32), empty(9, dtype=torch.int32))
    for tokens, dtype, bound in itertools.product((8, 2000), (torch.float32, BF16), (0.0, -5.0)):
        x, out, result = empty(tokens, 3 * width), empty(tokens, 3 * width), empty(tokens, heads, dim)
        causal_conv.causal_conv_extend(x, *conv, *ragged, out, 2 * heads, dim)
        q, k, v = (part.unflatten(-1, (heads, dim)) for part in out.split([width] * 3, -1))
        gates = (empty(tokens, heads, dim), empty(tokens, heads), a_log, empty(heads, dim, dtype=torch.float32), None)
        given = (kimi_delta_rule(dim, bound), q, k, v, *gates)
        states = empty(REQUESTS + 1, heads, dim, dim, dtype=dtype)
        channel_recurrence.channel_recurrence_extend(*given, states, *ragged, result)
        if tokens == 8:
            causal_conv.causal_conv_decode(x, *conv, slots, out, 2 * heads, dim)
            for num_sms in (1, 1000):
                channel_recurrence.channel_recurrence_decode(*given, states, slots, result, num_sms)
            kept = _kept(x, k, v, states, conv[-1], (heads, dim))
            _verify(channel_recurrence.CHANNEL_RECURRENCE, x, given, kept, conv, out, result, (2 * heads, dim))
        gated_norm.gated_rmsnorm(result, empty(tokens, width), empty(dim), 1e-6, sigmoid=True)


def _recurrent(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    rule: Rule,
    width: int,
    conv_bias: bool,
    arch: ArchTraits,
) -> None:
    """With states of both types; q, k and v are parts of what the convolution leaves, which is a part of a product."""
    keys, values, delta = key_heads * key_dim, heads * value_dim, rule.delta
    channels = 2 * keys + values
    conv = (empty(channels, width), empty(channels) if conv_bias else None, empty(REQUESTS + 1, width - 1, channels))
    heads_with_norm = (2 * key_heads, key_dim) if delta else (0, 0)
    per_head, skip = empty(heads, dtype=torch.float32), None if delta else empty(heads, dtype=torch.float32)
    slots = empty(8, dtype=torch.int64)
    ragged = (slots, slots, empty(8, dtype=torch.int32), empty(9, dtype=torch.int32))
    for tokens in (8, 2000):
        if delta:
            x, gate = empty(tokens, channels + values).split([channels, values], -1)
            b, a = empty(tokens, 2 * heads).split([heads, heads], -1)
        else:
            (gate, x, a), b = empty(tokens, values + channels + heads).split([values, channels, heads], -1), None
        out = empty(tokens, channels)
        causal_conv.causal_conv_extend(x, *conv, *ragged, out, *heads_with_norm)
        sizes = (key_dim, key_dim, value_dim)
        parts = zip(out.split([keys, keys, values], -1), sizes, strict=True)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in parts)
        given = (rule, q, k, v, a, b, per_head, per_head, skip)
        result = empty(tokens, heads, value_dim)
        for dtype in (torch.float32, BF16):
            states = empty(REQUESTS + 1, heads, key_dim, value_dim, dtype=dtype)
            for num_sms in (1, 8 * heads * -(-value_dim // 32), 1 << 20):  # each number of columns
                recurrence.recurrence_extend(*given, states, *ragged, result, num_sms)
            if tokens == 8:
                causal_conv.causal_conv_decode(x, *conv, slots, out, *heads_with_norm)
                for num_sms in (1, 1000):
                    recurrence.recurrence_decode(*given, states, slots, result, num_sms)
                kept = _kept(x, k, v, states, conv[-1], (heads,))
                _verify(recurrence.RECURRENCE, x, given, kept, conv, out, result, heads_with_norm)
        groups, weight = (heads, empty(value_dim)) if delta else (key_heads, empty(values))
        for sigmoid in (False, True) if delta else (False,):
            gated_norm.gated_rmsnorm(
                result.view(tokens, groups, -1), gate, weight, 1e-6, gate_first=not delta, sigmoid=sigmoid
            )


def _kept(
    x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, states: torch.Tensor, conv: torch.Tensor, decays: tuple[int, ...]
) -> VerifiedRows:
    tokens, heads = v.shape[:2]
    wide = empty(tokens, *decays, dtype=torch.float32), empty(tokens, heads, dtype=torch.float32)
    return VerifiedRows(states, conv, empty(*x.shape), k, v, *wide)


def _verify(
    kernels: StepKernels,
    x: torch.Tensor,
    given: tuple[Any, ...],
    kept: VerifiedRows,
    conv: tuple[Any, ...],
    out: torch.Tensor,
    result: torch.Tensor,
    norm: tuple[int, int],
) -> None:
    """Two tokens of each of four requests."""
    slots, counts, addresses = empty(4, dtype=torch.int64), empty(4, dtype=torch.int32), empty(1, 7, dtype=torch.int64)
    causal_conv.causal_conv_verify(x, *conv, slots, out, kept.x, *norm)
    causal_conv.CAUSAL_CONV.commit([kept], addresses, slots, counts, 2)
    kernels.verify(*given, kept.states, slots, result, kept.log_decays, kept.betas)
    kernels.commit(given[0], [kept], addresses, slots, counts, 2)


def _absent(mixer: Absent, tp_size: int, arch: ArchTraits) -> None: ...


_MIXERS: dict[type, Callable[..., None]] = {
    GQA: _grouped_query,
    MLA: _latent,
    CompressedSparse: _compressed_sparse,
    SharedSparse: _shared_sparse,
    PooledSparse: _pooled_sparse,
    PooledLatent: _pooled_latent,
    GatedDelta: _gated_delta,
    KimiDelta: _kimi_delta,
    Mamba2: _mamba2,
    Absent: _absent,
}


def _gemv(rows: int, cols: int, bias: bool, out_dtype: torch.dtype | None) -> None:
    x, weight = empty(1, cols), empty(rows, cols)
    if gemv.supports(x, weight):  # else cuBLAS
        gemv.linear(x, weight, empty(rows) if bias and out_dtype is None else None, out_dtype)
        if out_dtype is not None:  # routers may keep their weights in fp32
            gemv.linear(x, weight.float(), None, out_dtype)
    if skinny_gemm.supports(several := empty(2, cols), weight):
        gemv.linear(several, weight, empty(rows) if bias and out_dtype is None else None, out_dtype)


def linear_weight(total: int, cols: int, scheme: Scheme, static: bool) -> LinearWeight | None:
    """As the loader leaves it, or None for what no checkpoint can hold."""
    held = held_scheme(ModuleQuant(scheme.name, "compressed-tensors", static))
    per_row, per_col = scheme.group
    if per_row == 1 and per_col and cols % per_col:
        return None  # a group would be cut
    packed = 2 if scheme.bits == 4 else 1
    return LinearWeight(
        empty(total, cols // packed, dtype=ELEMENT_DTYPES[scheme.element]),
        held,
        empty(*held.scale_shape(total, cols), dtype=SCALE_DTYPES[scheme.scale]),
        empty(total, dtype=torch.float32) if scheme.global_scale else None,
        empty(1, dtype=torch.float32) if static else None,
    )


def _quantized_head(vocab: int, hidden: int, arch: ArchTraits) -> None:
    """Logits are fp32."""
    for scheme in SCHEMES.values():
        for part in (_products, _tall_products):
            part(vocab, hidden, False, scheme, scheme.activation == "nvfp4", arch, torch.float32)


def _of_a_weight(launch: Callable[..., None]) -> Callable[..., None]:
    """`launch` with a weight of these sizes, its bias, the sizes for which tiles are chosen, and the type of what it
    computes; nothing where the scheme has no such weight."""

    def part(
        rows: int, cols: int, bias: bool, scheme: Scheme, static: bool, arch: ArchTraits, out: torch.dtype = BF16
    ) -> None:
        weight = linear_weight(rows, cols, scheme, static)
        if weight is not None:
            with of_scheme("linear", scheme, arch):
                launch(_packed(weight, arch), empty(rows) if bias else None, (rows, cols, bias), out)

    return part


@_of_a_weight
def _products(
    weight: linear_products.PackedWeight, bias: torch.Tensor | None, sizes: tuple[int, int, bool], out: torch.dtype
) -> None:
    """For as many rows of x as a row of the table is for."""
    configs = linear_tiles.tile_configs_of(weight.weight.scheme, sizes, weight.arch)
    for tokens in (1, linear_tiles.FEW_ROWS):
        linear_products.few_rows(empty(tokens, sizes[1]), weight, config_for(configs, tokens).tiles[0], bias, out)
    tiles = _linear_tiles(weight)
    for tokens in tiles:
        linear_products.many_rows(empty(tokens, sizes[1]), weight, config_for(configs, tokens).tiles[0], bias, out)
    last_resort = linear_tiles.last_resort(linear_tiles.table_of(weight.product))
    linear_products.many_rows(empty(min(tiles), sizes[1]), weight, last_resort, bias, out)


@_of_a_weight
def _tall_products(
    weight: linear_products.PackedWeight, bias: torch.Tensor | None, sizes: tuple[int, int, bool], out: torch.dtype
) -> None:
    """With every tile, stepped down to, for many rows of x: so many that columns are not split."""
    with patch.object(linear_products, "operand", each_once(linear_products.operand)):
        for tile in (*_linear_tiles(weight).values(), linear_tiles.last_resort(linear_tiles.table_of(weight.product))):
            linear_products.many_rows(empty(MANY, sizes[1]), weight, tile, bias, out)


def _packed(weight: LinearWeight, arch: ArchTraits) -> linear_products.PackedWeight:
    # Weights without values need no order: torch takes a millisecond for each step of that.
    with patch(f"{ExpertWeights.__module__}._to_planes", lambda packed, scheme: packed):
        return linear_products.pack(weight, arch)


def _linear_tiles(weight: linear_products.PackedWeight) -> dict[int, Tile]:
    """By the most rows of x that the table has them for."""
    rows = linear_tiles.tile_rows(linear_tiles.table_of(weight.product), weight.arch.features)
    return {int(min(row.max_rows, MANY)): row.tile for row in rows}


def _routing(router: Router, experts: int, fused: bool, vocab: int) -> None:
    top_k, groups = router.top_k, (router.num_groups, router.top_groups)
    for valid, dtype in itertools.product((None, empty(1, dtype=torch.int32)), (BF16, torch.float32)):
        logits = empty(100, experts, dtype=dtype)
        if router.hash_table:
            ids, table = empty(100, dtype=torch.int64), empty(vocab, top_k, dtype=torch.int32)
            topk.topk_hash(logits, ids, table, router.score, router.scale, fused, valid)
        elif router.score == "softmax":
            topk.topk_softmax(logits, top_k, router.renormalize, router.scale, fused, valid, groups)
        else:
            bias = empty(experts, dtype=torch.float32) if router.correction else None
            route = getattr(topk, f"topk_{router.score}")
            route(logits, bias, top_k, router.renormalize, groups, router.scale, fused, valid)


def _expert_layers(experts: MoE, hidden: int, tp_size: int) -> Iterator[tuple[int, int, int, int, Scheme | None, bool]]:
    """(experts, choices, hidden, this rank's share of the intermediate size, scheme, static scales). Biases come in the
    model's own format only (with activations of either precision); any other experts may be quantized in every way."""
    for scheme in [None, *SCHEMES.values()]:
        if experts.bias and scheme is not None and not scheme.name.startswith(OWN_FORMAT_OF_BIASES):
            continue
        try:
            inter = expert_share(experts.intermediate_size, tp_size, scheme)
        except UserError:
            continue  # such a layout is refused
        for static in (False, True) if scheme and scheme.activation in ("tensor", "nvfp4") else (False,):
            choices, width = experts.top_k + experts.fused_shared, experts.latent_size or hidden
            yield experts.num_experts + experts.fused_shared, choices, width, inter, scheme, static


def expert_weights(
    experts: int,
    rows: int,
    cols: int,
    scheme: Scheme | None,
    static: bool,
    bias: bool,
    arch: ArchTraits,
    zero_points: bool = False,
) -> ExpertWeights:
    """As `expert_weights.repack` leaves them."""
    own_bias = empty(experts, rows) if bias else None
    if scheme is None:
        return ExpertWeights(empty(experts, rows, cols), bias=own_bias)
    planes = wants_planes(scheme, arch.features)
    stored = cols + (-cols % 128 if planes else 0)
    dtype = torch.int32 if planes else ELEMENT_DTYPES[scheme.element]
    per_element = 8 if planes else 8 // scheme.bits
    return ExpertWeights(
        empty(experts, rows, stored // per_element, dtype=dtype),
        scheme,
        empty(
            experts,
            *scheme.scale_shape(rows, stored),
            dtype=torch.int16 if zero_points else SCALE_DTYPES[scheme.scale],
        ),
        empty(experts, dtype=torch.float32) if scheme.global_scale else None,
        empty(1, dtype=torch.float32) if static else None,
        own_bias,
        cols if planes else None,
    )


def _experts(
    experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
) -> None:
    """Few pairs, many, groups of every size, and the tiles of a tuning file."""
    matrices, zeros = _expert_matrices(experts, hidden, inter, scheme, static, act, bias, arch)
    candidates = _candidates(scheme, arch)
    with patch.object(config_files, "files", _tuning_files):
        tuned = find(experts, inter, scheme.name if scheme else None, arch, hidden=hidden, bias=bias).tiles
    pairs = {str(pair): pair for pair in tuned.by_tokens.values()} if tuned else {}
    own = [(16, MoeTiles(float("inf"), pair.gate_up, pair.down)) for pair in pairs.values()]
    for each in filter(None, (matrices, zeros)):
        _launch(each, top_k, [(1, None), (MANY, candidates[0]), *(own if each is matrices else ())], act, arch)
    for block in {candidate.gate_up["BLOCK_M"] for candidate in candidates}:
        moe.align(empty(16, top_k, dtype=torch.int32), experts, block)
    own_kernel = "mma_sync_block_scale" in arch.features and act.trait in ("", "clamped_gate")
    if scheme is SCHEMES["mxfp4_mxfp8"] and own_kernel:
        with patch.multiple(mixed_moe, _library=NoLibrary, _stream=lambda x: 0):
            configs = tuple(mixed_from(0, -(-TALL_ROWS * experts // top_k) - 1))
            for pairs_an_expert in (MIXED_ROWS, TALL_ROWS):
                tokens = -(-pairs_an_expert * experts // top_k)
                x, weights = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32)
                ids = empty(tokens, top_k, dtype=torch.int32)
                mixed_moe.fused_moe(x, *matrices, weights, ids, act, configs)


def _expert_tiles(
    top_k: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
) -> None:
    """All tiles that many pairs may get: of the table, and what they step down to."""
    for each in filter(None, _expert_matrices(128, hidden, inter, scheme, static, act, bias, arch)):
        _launch(each, top_k, [(16, candidate) for candidate in _candidates(scheme, arch)], act, arch)


Experts = tuple[ExpertWeights, ExpertWeights]


def _expert_matrices(
    experts: int,
    hidden: int,
    inter: int,
    scheme: Scheme | None,
    static: bool,
    act: Activation,
    bias: bool,
    arch: ArchTraits,
) -> tuple[Experts, Experts | None]:
    """Both matrices, and those with zero points where the scheme has such."""

    def of(zero_points: bool) -> Experts:
        sizes = ((1 + act.gated) * inter, hidden), (hidden, inter)
        first, second = (expert_weights(experts, *each, scheme, static, bias, arch, zero_points) for each in sizes)
        return first, second

    return of(False), of(True) if scheme is not None and scheme.element == "int4" else None


def _candidates(scheme: Scheme | None, arch: ArchTraits) -> list[MoeTiles]:
    kind = product_of(scheme, arch.features).tile_kind
    return [*tile_rows(kind, arch.features), last_resort(kind)]


def _launch(
    matrices: Experts, top_k: int, launches: Sequence[tuple[int, MoeTiles | None]], act: Activation, arch: ArchTraits
) -> None:
    """For so many tokens, with tiles or those that a plan would choose."""
    w13, w2 = matrices
    once = patch.multiple(moe, _operand=each_once(moe._operand), align=each_once(moe.align))
    with of_scheme("fused_moe", w13.scheme, arch), once:
        for tokens, tiles in launches:
            x, weights = empty(tokens, w2.rows), empty(tokens, top_k, dtype=torch.float32)
            ids = empty(tokens, top_k, dtype=torch.int32)
            moe.fused_moe(
                x, w13, w2, weights, ids, act, tile_configs_of(w13, w2, ids, arch.features, tiles), arch.features
            )


def grouped_product(
    kind: str, scheme: Scheme | None, tile: Tile, sizes: tuple[int, int], arch: ArchTraits, bias: bool = False
) -> Variant:
    """One grouped product, `kind` "gate_up" or "down", with a tile, in the table or not. sizes: hidden, of an
    expert."""
    act = GPT_OSS_SWIGLU if bias else SILU
    static = scheme is not None and scheme.activation == "nvfp4"
    matrices, _ = _expert_matrices(128, *sizes, scheme, static, act, bias, arch)
    with recording(arch.name) as found:
        _launch(matrices, 8, [(16, MoeTiles(float("inf"), tile, tile))], act, arch)
    return next(form.variant("fused_moe", kind) for form in found if form.kernel == f"kernels.{kind}_kernel")


class NoLibrary:
    """sgl-kernel's, without launches: what is around them is Triton's."""

    MixedArguments = dict

    def mixed_moe_gate_up(self, args: object, block_m: int, max_blocks: int, stream: int) -> None: ...

    def mixed_moe_down(self, args: object, block_m: int, max_blocks: int, stream: int) -> None: ...


def _sampling(vocab: int) -> None:
    table = empty(REQUESTS + 1, ROW_WIDTH, dtype=torch.int32)
    state = empty(REQUESTS + 1, vocab, dtype=torch.int32)
    next_token = empty(REQUESTS + 1, dtype=torch.int64)
    for batch in (1, 8, 256):
        slots, positions = empty(batch, dtype=torch.int64), empty(batch, dtype=torch.int32)
        logits = empty(batch, vocab, dtype=torch.float32)
        mask = empty(batch, -(-vocab // 32), dtype=torch.int32)
        for own_state, own_mask in ((state, None), (None, mask), (state, mask)):
            sampling.adjust_logits(logits, table, slots, own_state, own_mask)
        thresholds = sampling.filter_thresholds(logits, table, slots)
        for of, greedy in ((None, True), (None, False), (thresholds, False)):
            for target in (next_token, None):
                sampling.draw_tokens(logits, table, slots, positions, of, greedy, target)
