"""Launches with sizes between those of the published models, and with features that none of them combines.

The ledger has rows for these too: a user's model may need them, and features cost most together.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.blocks.recurrent_state.kernels import gated_norm
from sglang.srt.blocks.short_convolution.kernels import short_convolution
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, RELU2, SILU
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES, SCHEMES
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tiles import HEAD_DIMS, MLA_LATENTS, MLA_WIDE
from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd
from sglang.srt.layers.attention.triton_ops.select_entries import select_entries
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles
from sglang.srt.layers.triton_ops import (
    activation,
    keep_last,
    linear_products,
    linear_tiles,
    quantize,
)
from sglang.srt.mem_cache import page_kernel
from sglang.srt.plan.layer_spec import AttentionShape
from sglang.srt.plan.model_description import describe_model

from ...layers.moe.shipped_products import shipped_products
from ..published import configs, described
from . import launch_all
from .adapters import launch_adapters, launch_adapters_of_ends, launch_expert_adapters, launch_latent_adapters
from .every_model import launch_norms
from .gqa import launch_attention, launch_rope_stores
from .inputs import CONTEXT, LAUNCHED, REQUESTS, SLOTS, empty, few_as_rounded, tiles_of
from .mla import launch_part_exchange
from .moe import (
    expert_matrices,
    launch_cpu_experts,
    launch_expert_slots,
    launch_expert_tiles,
    launch_experts,
    launch_fused_moe,
    launch_routing,
)
from .pooled_sparse import launch_pooled_sparse
from .products import launch_products, launch_tall_products, with_weight

COLUMNS = (1024, 1536, 768, 384, 192, 128, 96, 64, 11_552)
"""Columns of weights, by the largest power of two that divides them: what the tiles of few rows are cut by."""
ODD_COLUMNS = (1368, 264, 200, 72)
"""Those that 16 does not divide: shares of MLPs."""
HIDDEN_SIZES = (4096, 2688, 2816, 3584)
EXPERTS = 48
"""No tuning file is for so many."""
ODD = 1368
"""Columns of a share that 16 does not divide."""
USUAL_DRAFT_TOKENS = 3


def launch_between(arch: ArchTraits, done: set[object]) -> None:
    """Everything below. done: as of `census.launch_all`."""
    llama, mixtral = (configs()[name] for name in ("Meta-Llama-3.1-8B", "Mixtral-8x7B-v0.1"))
    others = [llama | {"head_dim": dim} for dim, v_dim in HEAD_DIMS if dim == v_dim]
    others += [mixtral | {"num_local_experts": experts} for experts in (2, 4, 16, 32)]
    others.append(llama | {"vocab_size": 128_258})
    for config in others:
        launch_all(describe_model(config, None, False), 1, arch, done)
    _pooled_sparse_of_128(arch)
    _attention(arch)
    _rotations()
    _norms()
    _products(arch)
    _dequantized_products(replace(arch, features=arch.features - {"block_scaled_mma", "mma_sync_block_scale"}))
    _shipped_tiles(arch)
    _routers()
    _pages()
    launch_adapters()
    launch_adapters_of_ends()
    launch_expert_adapters()
    launch_latent_adapters()
    _drafts_of_convolutions()
    _selections()


def _attention(arch: ArchTraits) -> None:
    """A cap and sinks together, with a window and without, for heads of every width."""
    for dims in HEAD_DIMS:
        if dims == MLA_WIDE:  # of windows alone, as the published model launches them
            continue
        latent = dims in MLA_LATENTS
        shape = AttentionShape(8, 1 if latent else 2, *dims)
        for window, cap, sinks in ((0, 0.0, False), (0, 30.0, True), (128, 30.0, True)):
            launch_attention(shape, window, cap, sinks, arch, latent=latent)
        if dims[1] % 16 == 0:
            launch_part_exchange(8, dims[1], 2)
        q, k, v, out = (empty(100, 8, dim) for dim in (dims[0], dims[0], dims[1], dims[1]))
        v = k[..., : dims[1]] if latent else v
        for tile in tiles_of("prefill_attention", *dims, "bfloat16", arch):
            for causal in (True, False):
                context_attention_fwd(q, k, v, out, empty(9, dtype=torch.int32), is_causal=causal, tile=tile)


def _pooled_sparse_of_128(arch: ArchTraits) -> None:
    """A published mixer with heads of half the width."""
    layers = itertools.chain.from_iterable(model.layers for _, model in described())
    mixer = next(layer.mixer for layer in layers if isinstance(layer.mixer, PooledSparse))
    heads = replace(mixer.heads, head_dim=128, values=replace(mixer.heads.values, dim=128))
    launch_pooled_sparse(replace(mixer, heads=heads), 1, arch)


def _rotations() -> None:
    """Heads of 256 dims of which 64 rotate, with norms in 16 bits, and four-bit slots of an odd number of heads."""
    for shape, rot in ((AttentionShape(8, 2, 256, 256), 64), (AttentionShape(8, 1, 80, 80), 80)):
        launch_rope_stores(shape, rot, empty(shape.head_dim), True)


def _norms() -> None:
    for hidden in (1024, 16_384):
        launch_norms(hidden, True)
    for groups, size, tokens in itertools.product((1, 8), (128, 512, 1024, 2048), (1, 4096)):
        x, width = empty(tokens, groups, size), groups * size
        apart = empty(tokens, width + 8)[:, :width]
        for first, gate in ((False, empty(tokens, width)), (True, empty(tokens, width)), (True, apart)):
            gated_norm.gated_rmsnorm(x, gate, empty(size), 1e-6, gate_first=first)
    for function, tokens in itertools.product((GPT_OSS_SWIGLU, RELU2), (1, 100)):
        activation.activate(empty(tokens, (1 + function.gated) * ODD), function)
    # No launcher of the server gets here: activations without a static scale get one for each token.
    quantize.quantize_activation(empty(100, 4096), SCHEMES["fp8_tensor"], None)


def _products(arch: ArchTraits) -> None:
    for scheme in LAUNCHED:
        static = scheme.activation == "nvfp4"
        for cols in ODD_COLUMNS if scheme.group[1] == 0 else ():
            _few_rows(1024, cols, True, scheme, static, arch)
        for cols in COLUMNS:
            launch_products(1024, cols, True, scheme, static, arch)
            if scheme.name in HEAD_SCHEMES:
                launch_products(1024, cols, False, scheme, static, arch, torch.float32)
    for scheme, hidden in itertools.product((None, *LAUNCHED), HIDDEN_SIZES):
        static = scheme is not None and scheme.activation == "nvfp4"
        for inter in (1024, 11_552):
            if not (scheme and scheme.group[1] and inter % scheme.group[1]):
                launch_experts(EXPERTS, 8, hidden, inter, scheme, static, SILU, False, arch)
    matrices, _ = expert_matrices(EXPERTS, 4096, 96, SCHEMES["fp8_block"], False, SILU, False, arch)
    launch_fused_moe(matrices, 8, [(1, None)], SILU, arch)
    for inter in (2880, 768, 384):
        launch_experts(EXPERTS, 4, 2880, inter, None, False, GPT_OSS_SWIGLU, True, arch)


@with_weight
def _few_rows(
    weight: linear_products.PackedWeight, bias: torch.Tensor | None, sizes: tuple[int, int, bool], out: torch.dtype
) -> None:
    few = linear_tiles.tile_configs_of(weight.weight.scheme, sizes, weight.arch)[0]
    if not few_as_rounded(weight.product):
        linear_products.few_rows(empty(1, sizes[1]), weight, few.tiles[0], bias, out)


def _dequantized_products(other: ArchTraits) -> None:
    """On GPUs without packed instructions, which are judged by these rows."""
    for scheme in (SCHEMES["mxfp4_mxfp8"], SCHEMES["nvfp4"]):
        for cols in COLUMNS:
            launch_products(1024, cols, True, scheme, False, other)
            launch_tall_products(1024, cols, True, scheme, False, other)
        for inter, hidden in itertools.product((*COLUMNS, 2880), HIDDEN_SIZES):
            if inter % scheme.group[1] == 0:
                launch_experts(EXPERTS, 8, hidden, inter, scheme, False, SILU, False, other)
                launch_expert_tiles(2, hidden, inter, scheme, False, SILU, False, other)


def _shipped_tiles(arch: ArchTraits) -> None:
    """Those of the package's own files, for experts of every kind that finds them. A file for experts with biases
    serves others too."""
    products = list(shipped_products(arch.features))
    for up, down in zip(products[::2], products[1::2], strict=True):
        scheme = SCHEMES[up.scheme] if up.scheme else None
        static = scheme is not None and scheme.activation == "nvfp4"
        for bias, hidden in {(up.bias, up.hidden), (False, 4096 if up.bias else up.hidden)}:
            act = GPT_OSS_SWIGLU if bias else SILU
            sizes = hidden, up.intermediate
            matrices, _ = expert_matrices(128, *sizes, scheme, static, act, bias, arch)
            launch_fused_moe(matrices, 8, [(16, MoeTiles(float("inf"), up.tile, down.tile))], act, arch)


def _routers() -> None:
    router = Router(top_k=8)
    for experts, top_k in ((2, 2), (4, 2), (8, 2), (16, 4), (32, 4), (60, 4), (64, 6), (128, 8), (256, 8), (512, 10)):
        for renormalize in (True, False):
            launch_routing(replace(router, top_k=top_k, renormalize=renormalize), experts, True, 32_000)
    launch_routing(replace(router, top_k=6, num_groups=8, top_groups=3), 160, True, 32_000)


def _pages() -> None:
    strips, at = empty(6, 4, dtype=torch.int64), empty(3, dtype=torch.int64)
    launch_cpu_experts()
    launch_expert_slots()
    for word, width, to_rows in itertools.product((torch.int64, torch.int32), page_kernel.WIDTHS, (True, False)):
        page_kernel.copy_rows(strips, width, at, at, empty(8, 1000, dtype=word), to_rows)


def _drafts_of_convolutions() -> None:
    """Whose rows are computed again."""
    width, taps = 4096, 4
    kept = empty(REQUESTS, taps - 1 + USUAL_DRAFT_TOKENS, width)
    at = empty(100, dtype=torch.int64)
    requests, rows = TokenRequests(at, at, at, at), empty(100, width)
    short_convolution.convolve(rows, empty(width, taps), kept, requests, empty(100, width))
    keep_last.keep_last(rows, kept, requests)


def _selections() -> None:
    """Among as many entries as a context may have."""
    table, at = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32), empty(8, dtype=torch.int64)
    counts, more = empty(8, dtype=torch.int32), dict[str, Any](dtype=torch.int32)
    for top_k, entries in itertools.product((512, 1024, 2048), (SLOTS, 1 << 20, 1 << 23)):
        rows = EntryRows(table, at, counts, entries, 1)
        logits = empty(8, entries, dtype=torch.float32)
        select_entries(logits, rows, top_k, empty(8, top_k, **more), empty(8, **more))
