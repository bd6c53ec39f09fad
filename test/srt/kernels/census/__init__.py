"""Every Triton launcher with the sizes of the published models, on meta tensors: what the server can ask Triton for.

The sizes are those of the models' descriptions, which the server builds models of, on one rank of every layout that it
accepts. `launch_all` runs the launchers; under `launch_form.recording` nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.engram.spec import Engram
from sglang.srt.blocks.gated_delta.spec import GatedDelta
from sglang.srt.blocks.gated_streams.spec import GatedStreams
from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.kimi_delta.spec import KimiDelta
from sglang.srt.blocks.mamba2.spec import Mamba2
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.blocks.ngram_embedding.spec import NgramEmbedding
from sglang.srt.blocks.per_layer_embedding.spec import PerLayerEmbedding
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.blocks.shared_sparse.spec import SharedSparse
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import Absent, FeedForward, LayerSpec
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Matrix

from ..published import LAYOUTS, accepted_layouts, described
from .compressed import launch_compressed_sparse
from .engram import launch_engram
from .every_model import (
    launch_decode_inputs,
    launch_draft_rows,
    launch_embedding_rows,
    launch_image_encoder,
    launch_ngram_drafts,
    launch_norms,
    launch_quantized_sums,
    launch_sampling,
)
from .gated_streams import launch_gated_streams
from .gated_sum import launch_gated_sum
from .gqa import launch_gqa, launch_image_attention
from .hyper_connections import launch_hyper_connections
from .inputs import alike
from .kimi_delta import launch_kimi_delta
from .mla import launch_mla, launch_part_exchange
from .mlp import launch_activation
from .moe import expert_layers, launch_expert_tiles, launch_experts, launch_latent_norms, launch_routing
from .ngram_embedding import launch_ngram_embedding
from .pooled_latent import launch_pooled_latent
from .pooled_sparse import launch_pooled_sparse
from .products import launch_gemv, launch_matrix, launch_quantized_head
from .recurrent_state import launch_gated_delta, launch_mamba2
from .region_sparse import launch_region_sparse
from .shared_sparse import launch_shared_sparse
from .short_convolution import launch_short_convolution
from .trellis import launch_trellises

SEEING_THEMSELVES = ("Gemma4ForConditionalGeneration",)
"""Models whose images see themselves both ways in layers with a window."""


def launch_published(arch: ArchTraits, done: set[object]) -> None:
    """Everything that can be launched for all of them."""
    for model, tp_size in models():
        launch_all(model, tp_size, arch, done)


def models(names: Sequence[str] = (), layouts: Sequence[int] = LAYOUTS) -> Iterator[tuple[ModelDescription, int]]:
    """Every model (or those named) with every number of ranks that a server accepts for it in some number format."""
    for _, model in described(names):
        for tp_size in accepted_layouts(model, layouts):
            yield model, tp_size


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

    once(launch_decode_inputs)
    once(launch_draft_rows)
    once(launch_ngram_drafts)
    once(launch_trellises)
    once(launch_embedding_rows, -(-model.vocab_size // tp_size), model.hidden_size)
    once(launch_norms, model.hidden_size, model.zero_centred_norms)
    for layer in dict.fromkeys(model.layers):
        kind = type(layer.mixer)
        assert kind in _MIXERS, f"_MIXERS in {__file__} has no function that launches {kind.__name__}"
        once(_MIXERS[kind], layer.mixer, tp_size, arch)
        if isinstance(layer.mixer, MLA) or (isinstance(layer.mixer, GQA) and layer.mixer.caches_tokens):
            for dcp_size in (size for size in range(2, tp_size + 1) if tp_size % size == 0):
                shape = layer.mixer.attention_shape(tp_size)
                once(
                    launch_part_exchange,
                    shape.num_heads,
                    shape.v_head_dim,
                    layer.mixer.effective_dcp_size(tp_size, dcp_size),
                )
        if isinstance(layer.mixer, GQA) and layer.mixer.window and model.architecture in SEEING_THEMSELVES:
            once(launch_image_attention, layer.mixer.attention_shape(tp_size), layer.mixer.window, arch)
        for block in layer.token_blocks:
            _feed_forward(once, block, model.hidden_size, tp_size, arch, alike)
        if isinstance(layer.residual, HyperConnections):
            once(launch_hyper_connections, layer.residual, model.hidden_size)
        if isinstance(layer.residual, GatedStreams):
            once(launch_gated_streams, layer.residual.streams, layer.residual.rank, model.hidden_size)
        if isinstance(layer.residual, GatedSum):
            once(launch_gated_sum, model.hidden_size)
        if layer.convolution is not None:
            once(launch_short_convolution, layer.convolution)
        if isinstance(layer.ngrams, Engram):
            once(launch_engram, layer.ngrams, tp_size)
        elif isinstance(layer.ngrams, NgramEmbedding):
            once(launch_ngram_embedding, layer.ngrams, tp_size)
        whole, share = _matrices(layer, model.hidden_size, 1), _matrices(layer, model.hidden_size, tp_size)
        for matrix, of_all in zip(share, whole, strict=True):
            launch_matrix(once, matrix, matrix.cols < of_all.cols, arch, alike)
    once(launch_gemv, -(-model.vocab_size // tp_size), model.hidden_size, False, torch.float32)
    launch_quantized_head(once, -(-model.vocab_size // tp_size), model.hidden_size, arch, alike)
    once(launch_image_encoder, model.vision_head_dim, arch)
    once(launch_sampling, model.vocab_size)
    if tp_size > 1:
        once(launch_quantized_sums, model.hidden_size, tp_size)


def _feed_forward(
    once: Callable[..., None],
    block: FeedForward,
    hidden: int,
    tp_size: int,
    arch: ArchTraits,
    alike: Callable[[int], int],
) -> None:
    if isinstance(block, Dense):
        once(launch_activation, block.activation, block.padded_rows(tp_size))
    elif isinstance(block, PerLayerEmbedding):
        once(launch_activation, block.activation, block.size)
    elif isinstance(block, MoE):
        once(launch_routing, block.router, block.num_experts, block.fused_shared, block.vocab_size)
        if block.shared is not None and not block.fused_shared:
            once(launch_activation, block.activation, block.shared.dense(block.activation).padded_rows(tp_size))
        if block.latent_norms is not None:
            once(launch_latent_norms, block.latent_size)
        for experts, choices, width, inter, *format in expert_layers(block, hidden, tp_size):
            normed = block.latent_norms is not None
            once(launch_experts, experts, choices, width, inter, *format, block.activation, block.bias, arch, normed)
            sizes = min(choices, 2), alike(width), alike(inter)
            once(launch_expert_tiles, *sizes, *format, block.activation, block.bias, arch)


def _matrices(layer: LayerSpec, hidden: int, tp_size: int) -> list[Matrix]:
    """Of one rank, without experts: the shares of others do not depend on theirs."""
    weights = layer.weights(hidden, RankLayout(tp_size), 1)
    return [part for part in weights if isinstance(part, Matrix) and not part.experts and part.dtype is None]


def _absent(mixer: Absent, tp_size: int, arch: ArchTraits) -> None: ...


_MIXERS: dict[type, Callable[..., None]] = {
    GQA: launch_gqa,
    MLA: launch_mla,
    CompressedSparse: launch_compressed_sparse,
    SharedSparse: launch_shared_sparse,
    PooledSparse: launch_pooled_sparse,
    RegionSparse: launch_region_sparse,
    PooledLatent: launch_pooled_latent,
    GatedDelta: launch_gated_delta,
    KimiDelta: launch_kimi_delta,
    Mamba2: launch_mamba2,
    Absent: _absent,
}
