"""Launches of blocks/gqa, with caches of every type."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from sglang.srt.blocks.gqa.kernels import whole_norm
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.recurrent_state.kernels import gated_norm
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tiles import fp4_head_dims
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_fwd
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_biased import extend_biased_fwd
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_fwd
from sglang.srt.layers.attention.triton_ops.prefix_parts import WHOLE, PrefixParts
from sglang.srt.layers.triton_ops import rope_store
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.plan.attention_parts import ElementGate, HeadGate, PerHead, Whole
from sglang.srt.plan.layer_spec import AttentionShape

from .block_selection import launch_block_sparse, launch_token_sparse
from .inputs import BF16, CACHE_NAMES, CACHES, CONTEXT, FP4, MANY, REQUESTS, SLOTS, empty, tiles_of
from .short_convolution import launch_convolution


def launch_gqa(mixer: GQA, tp_size: int, arch: ArchTraits) -> None:
    shape = mixer.attention_shape(tp_size)
    if mixer.caches_tokens and shape.head_dim == shape.v_head_dim:  # the kernel refuses others, which torch serves
        launch_rope_store(shape, mixer)
    if isinstance(mixer.qk_norm, Whole):
        _whole_norm(shape)
    mask, softmax = mixer.mask, mixer.softmax
    launch_attention(shape, mask.window, softmax.logit_cap, softmax.sinks, arch, mask.chunked, extent=softmax.extent)
    if mixer.kv_convolution is not None:
        width = shape.num_heads * shape.head_dim
        channels = mixer.kv_channels(tp_size)
        launch_convolution(mixer.kv_convolution.taps, empty(100, width + channels)[:, width:])
    if isinstance(mixer.gate, HeadGate):
        width = shape.num_heads * shape.head_dim
        gated_norm.attention_head_gate(empty(8, width), empty(8, shape.num_heads))
    if isinstance(mixer.indexer, TokenIndexer):
        launch_token_sparse(shape, mixer.indexer, mixer.rotary_dim, arch)
    elif mixer.indexer is not None:
        launch_block_sparse(shape, mixer.indexer, mixer.rotary_dim, arch)
    if isinstance(mixer.gate, ElementGate):
        width = shape.num_heads * shape.head_dim
        if mixer.gate.normed:
            _gated_norm(shape)
        else:
            gated_norm.attention_output_gate(empty(8, width), empty(8, 2 * width)[:, width:])


def _gated_norm(shape: AttentionShape) -> None:
    """Of few rows and of many. The gates of a head follow its queries, keys and values."""
    heads, dim, before = shape.num_heads, shape.v_head_dim, shape.num_heads + 2 * shape.num_kv_heads
    for tokens in (1, 100, MANY):
        gates = empty(tokens, (heads + before) * dim)[:, before * dim :]
        gated_norm.gated_rmsnorm(empty(tokens, heads, dim), gates, empty(dim), 1e-6, sigmoid=True)


def _whole_norm(shape: AttentionShape) -> None:
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for reduce in (None, lambda sums: sums):
        whole_norm.qk_whole_norm(empty(8, q + 2 * k), empty(q), empty(k), 1e-6, (q, k), 1, reduce)


def launch_rope_store(shape: AttentionShape, mixer: GQA, four_bits: bool = True) -> None:
    """`four_bits`: whether the layer's cache may have them."""
    norm, weight = mixer.qk_norm, None
    if isinstance(norm, PerHead):
        weight = empty(shape.head_dim, dtype=torch.float32 if norm.fp32 else BF16)
    launch_rope_stores(shape, mixer.rotary_dim, weight, mixer.rope.is_neox_style, four_bits)


def launch_rope_stores(
    shape: AttentionShape, rotary_dim: int, weight: torch.Tensor | None, is_neox_style: bool, four_bits: bool = True
) -> None:
    """Stores into caches of every type. weight: of the norms of heads."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    caches = [
        {name: empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype]) for name in CACHE_NAMES} for dtype in CACHES
    ]
    if four_bits and (dim, dim) in fp4_head_dims():
        caches.append(fp4_caches(shape))
    for stored, tokens in itertools.product(caches, (1, 100, 300)):
        rope_store.qk_norm_rope_store(
            empty(tokens, (heads + 2 * kv_heads) * dim), empty(tokens, dtype=torch.int64),
            empty(CONTEXT, rotary_dim, dtype=torch.float32), weight, weight, 1e-6, heads, kv_heads, dim,
            out_cache_loc=empty(tokens, dtype=torch.int64), is_neox_style=is_neox_style, **stored,
        )  # fmt: skip


def launch_attention(
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


def launch_image_attention(shape: AttentionShape, window: int, arch: ArchTraits) -> None:
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
