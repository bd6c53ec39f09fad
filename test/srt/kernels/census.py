"""Every Triton launcher with the sizes of the published models, on meta tensors: what the server can ask Triton for.

`Shape` is one rank's share of a model; `shapes()` gives those of `configs/census.json` (sizes from published
config.json files) in every layout. `launch_all` runs the launchers; under `launch_form.recording` nothing is compiled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU
from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES, SCHEMES, Scheme, expert_share
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.tiles import attention_tiles
from sglang.srt.layers.attention.latent_chunks import LatentChunk
from sglang.srt.layers.attention.triton_ops import latent_prompt
from sglang.srt.layers.attention.triton_ops.decode_attention import DecodeWorkspace, decode_attention_fwd, plan_decode
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_ops.prefill_attention import context_attention_fwd
from sglang.srt.layers.moe import mixed_moe
from sglang.srt.layers.moe.expert_weights import ELEMENT_DTYPES, SCALE_DTYPES, ExpertWeights, wants_planes
from sglang.srt.layers.moe.fused_moe_triton import fused_moe as moe
from sglang.srt.layers.moe.fused_moe_triton.config_files import find
from sglang.srt.layers.moe.fused_moe_triton.tiles import MoeTiles, last_resort, tile_rows
from sglang.srt.layers.quantization.linear_weight import LinearWeight, held_scheme
from sglang.srt.layers.recurrent.rule import Rule, gated_delta_rule
from sglang.srt.layers.recurrent.triton_ops import causal_conv, gated_norm, recurrence
from sglang.srt.layers.triton_ops import (
    activation,
    gemv,
    latent_store,
    linear_tiles,
    norm,
    quant_linear,
    rope_store,
    sampling,
    topk,
)
from sglang.srt.layers.triton_ops.scaled_dot import product_of
from sglang.srt.mem_cache.memory_pool import STORAGE_DTYPES
from sglang.srt.sampling.sampling_table import ROW_WIDTH

CONFIGS = Path(__file__).parent / "configs" / "census.json"
LAYOUTS = (1, 2, 4, 8)
BF16 = torch.bfloat16
CACHES = ("bfloat16", "fp8_e4m3", "fp8_e5m2")
MANY = 4096
"""Tokens of one step: for the largest tiles, and for the way of grouping that takes several launches."""
CONTEXT = 32_768
SLOTS = 65_536
REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What one rank holds of a model. Zero, empty and None: it has none of that."""

    model: str
    tp: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dims: tuple[int, int]
    rotary: int = 0  # 0: the fused norm, rotation and store does not serve the model
    interleaved: bool = False
    qk_norm: bool = False
    bias: bool = False
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    inter: int = 0
    experts: int = 0
    expert_inter: int = 0  # of the whole model: schemes differ in the shares
    top_k: int = 0
    score: str = "softmax"
    groups: tuple[int, int] = (1, 1)
    correction: bool = False
    hashed: bool = False
    shared: bool = False
    expert_bias: bool = False
    expert_scheme: str | None = None
    prompt_heads: tuple[int, int] = (0, 0)  # of latent attention over uncompressed prompts
    dense_heads: tuple[int, int] = (0, 0)  # of an image encoder
    causal: bool = True  # of that
    recurrent: tuple[int, int, int, int] = (0, 0, 0, 0)  # key and value heads, dims of a key and a value
    delta: bool = True  # the gated delta rule; else Mamba-2


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shapes(names: Sequence[str] = (), layouts: Sequence[int] = LAYOUTS) -> Iterator[Shape]:
    """Every model (or those named) in every layout that divides its heads."""
    for name, model in json.loads(CONFIGS.read_text()).items():
        if names and name not in names:
            continue
        for tp in layouts:
            heads, kv_heads = model["heads"], model["kv_heads"]
            if heads % tp or (kv_heads % tp and tp % kv_heads) or model.get("inter", 0) % tp:
                continue
            tuples = ("head_dims", "groups", "prompt_heads", "dense_heads", "recurrent")
            dims = {key: tuple(model[key]) for key in tuples if key in model}
            whole = Shape(**{"model": name, "tp": tp} | model | dims)
            yield replace(whole, heads=heads // tp, kv_heads=max(1, kv_heads // tp), inter=whole.inter // tp)


def launch_all(shape: Shape, arch: ArchTraits, done: set[object]) -> None:
    """Everything that a server of this shape can launch, with caches and weights of every format. `done`: what was
    launched with the same sizes before, for other shapes; it is not launched again."""

    def once(part: Callable[..., None], *sizes: object) -> None:
        if (part, sizes) not in done:
            done.add((part, sizes))
            part(*sizes)

    once(_elementwise, shape.hidden, shape.inter)
    fp32_norms = shape.delta and any(shape.recurrent)
    if fp32_norms:
        once(_fp32_norms, shape.hidden)
    attention = (shape.heads, shape.kv_heads, shape.head_dims)
    if shape.rotary:
        once(_rope_store, *attention, shape.rotary, shape.qk_norm, shape.interleaved, fp32_norms)
    once(_attention, *attention, shape.window, shape.cap, shape.sinks, arch)
    if any(shape.prompt_heads):
        once(_latent, shape.heads, shape.head_dims, shape.prompt_heads, arch)
    once(_dense_attention, 16 if not shape.causal else shape.heads, shape.dense_heads, shape.causal, arch)
    if any(shape.recurrent):
        key_heads, value_heads, key_dim, value_dim = shape.recurrent
        once(_recurrent, key_heads // shape.tp, value_heads // shape.tp, key_dim, value_dim, shape.delta)
        if shape.delta:
            once(_output_gate, shape.heads * shape.head_dims[1])
    for rows, cols, bias in _unquantized(shape):
        once(_gemv, rows, cols, bias)
    once(_quantized_head, -(-shape.vocab // shape.tp), shape.hidden, arch)
    for rows, cols, bias in _projections(shape):
        for scheme in SCHEMES.values():
            for static in (False, True) if scheme.activation == "tensor" else (scheme.activation == "nvfp4",):
                once(_products, rows, cols, bias, scheme, static, arch)
    if shape.experts:
        routing = (shape.experts, shape.top_k, shape.score, shape.groups, shape.correction, shape.shared)
        once(_routing, *routing, shape.vocab if shape.hashed else 0)
        for layer in _expert_layers(shape):
            once(_experts, *layer, arch)
    once(_sampling, shape.vocab)


def _elementwise(hidden: int, inter: int) -> None:
    weight = empty(hidden)
    for tokens in (1, 100):
        norm.rmsnorm(empty(tokens, hidden), weight, 1e-6)
        norm.fused_add_rmsnorm(empty(tokens, hidden), empty(tokens, hidden), weight, 1e-6)
        if inter:
            activation.silu_and_mul(empty(tokens, 2 * inter))


def _fp32_norms(hidden: int) -> None:
    """Norms whose weights checkpoints store minus 1."""
    weight = empty(hidden, dtype=torch.float32)
    norm.rmsnorm(empty(100, hidden), weight, 1e-6)
    norm.fused_add_rmsnorm(empty(100, hidden), empty(100, hidden), weight, 1e-6)


def _rope_store(
    heads: int, kv_heads: int, head_dims: tuple[int, int], rotary: int, qk_norm: bool, interleaved: bool, fp32: bool
) -> None:
    dim = head_dims[0]
    weight = empty(dim, dtype=torch.float32 if fp32 else BF16) if qk_norm else None
    for dtype in CACHES:
        k, v = (empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype]) for _ in "kv")
        for tokens in (1, 100, 300):
            rope_store.qk_norm_rope_store(
                empty(tokens, (heads + 2 * kv_heads) * dim), empty(tokens, dtype=torch.int64),
                empty(CONTEXT, rotary, dtype=torch.float32), weight, weight, 1e-6, heads, kv_heads, dim, k, v,
                empty(tokens, dtype=torch.int64), 1.0, 1.0, interleaved,
            )  # fmt: skip


def _attention(
    heads: int,
    kv_heads: int,
    head_dims: tuple[int, int],
    window: int,
    cap: float,
    sinks: bool,
    arch: ArchTraits,
) -> None:
    dim, v_dim = head_dims
    latent = dim != v_dim
    # Models with a window have layers without one as well.
    common = {"logit_cap": cap, "sinks": empty(heads, dtype=torch.float32) if sinks else None}
    layers = [common | {"sliding_window": size} for size in sorted({0, window})]
    for dtype in CACHES:
        k_cache = empty(SLOTS, kv_heads, dim, dtype=STORAGE_DTYPES[dtype])
        v_cache = k_cache[..., :v_dim] if latent else empty(SLOTS, kv_heads, v_dim, dtype=STORAGE_DTYPES[dtype])
        table = empty(REQUESTS + 1, CONTEXT, dtype=torch.int32)
        slots, lens = empty(8, dtype=torch.int64), empty(8, dtype=torch.int32)
        # As the projection leaves them: three parts of one row.
        q, k, v = empty(100, (heads + 2 * kv_heads) * dim).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        if latent:
            q, k = empty(100, heads, dim), empty(100, kv_heads, dim)
            v = k[..., :v_dim]
        for tile in attention_tiles("extend_attention", dim, v_dim, dtype, arch.features):
            for layer in layers:
                for prefix in (True, False):
                    extend_attention_fwd(
                        q, k, v, empty(100, heads, v_dim), k_cache, v_cache, table, slots, lens,
                        empty(9, dtype=torch.int32), scale=0.1, tile=tile, has_prefix=prefix, **layer,
                    )  # fmt: skip
        for tile in attention_tiles("decode_attention", dim, v_dim, dtype, arch.features):
            workspace = DecodeWorkspace.allocate(64, heads, kv_heads, v_dim, arch.num_sms, tile, "meta")
            plan_decode(lens, workspace, tile)
            for layer in layers:
                decode_attention_fwd(
                    q[:8], empty(8, heads, v_dim), k_cache, v_cache, table, slots, lens, workspace,
                    scale=0.1, tile=tile, **layer,
                )  # fmt: skip


def _latent(heads: int, latent: tuple[int, int], prompt: tuple[int, int], arch: ArchTraits) -> None:
    """Beside absorbed attention: the store, and prompts over the prefixes of two requests in two chunks each."""
    dim, rank = latent
    rot, (head_dim, v_dim) = dim - rank, prompt
    w_uk, w_uv = empty(heads, head_dim - rot, rank), empty(heads, rank, v_dim)
    cos_sin = empty(CONTEXT, rot, dtype=torch.float32)
    bounds = empty(3, dtype=torch.int32)
    for dtype, interleaved in itertools.product(CACHES, (True, False)):
        cache = empty(SLOTS, 1, dim, dtype=STORAGE_DTYPES[dtype])
        for tokens, absorbed in ((1, 1), (100, None), (300, 16)):
            # The latent is a part of the product that makes q's latent too.
            latents, positions = empty(tokens, 1536 + dim)[:, 1536:], empty(tokens, dtype=torch.int64)
            queries = empty(tokens, heads, head_dim)
            entries = latent_store.latent_norm_rope_store(
                queries, latents, None if absorbed is None else empty(absorbed, heads, dim), positions, cos_sin,
                empty(rank), 1e-6, cache, positions, 1.0, interleaved,
            )  # fmt: skip
        chunks = [LatentChunk(empty(64, dtype=torch.int64), bounds)] * 2
        for tile in attention_tiles("latent_prompt_attention", *prompt, "bfloat16", arch.features):
            for prefix in ([], chunks):
                out = empty(tokens, heads, v_dim)
                latent_prompt.latent_prompt_attention(
                    queries, entries, w_uk, w_uv, out, bounds, cache, prefix, scale=0.1, tile=tile
                )


def _dense_attention(heads: int, head_dims: tuple[int, int], causal: bool, arch: ArchTraits) -> None:
    dim, v_dim = head_dims
    for tile in attention_tiles("prefill_attention", dim, v_dim, "bfloat16", arch.features):
        q, k, v, o = empty(100, heads, dim), empty(100, heads, dim), empty(100, heads, v_dim), empty(100, heads, v_dim)
        context_attention_fwd(q, k, v, o, empty(9, dtype=torch.int32), is_causal=causal, tile=tile)


def _recurrent(key_heads: int, heads: int, key_dim: int, value_dim: int, delta: bool) -> None:
    """With states of both types; q, k and v are parts of what the convolution leaves, which is a part of a product."""
    keys, values = key_heads * key_dim, heads * value_dim
    channels = 2 * keys + values
    conv = (empty(channels, 4), None if delta else empty(channels), empty(REQUESTS + 1, 3, channels))
    heads_with_norm = (2 * key_heads, key_dim) if delta else (0, 0)
    rule = gated_delta_rule(key_dim) if delta else Rule(delta=False)
    per_head, skip = empty(heads, dtype=torch.float32), None if delta else empty(heads, dtype=torch.float32)
    slots = empty(8, dtype=torch.int64)
    ragged = (slots, slots, empty(8, dtype=torch.int32), empty(9, dtype=torch.int32))
    for tokens in (8, 2000):
        x, out = empty(tokens, channels + values)[:, :channels], empty(tokens, channels)
        causal_conv.causal_conv_extend(x, *conv, *ragged, out, *heads_with_norm)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(
            out.split([keys, keys, values], -1), (key_dim, key_dim, value_dim), strict=True
        ))  # fmt: skip
        a, b = empty(tokens, 2 * heads).split([heads, heads], -1)
        given = (rule, q, k, v, a, b if delta else None, per_head, per_head, skip)
        result = empty(tokens, heads, value_dim)
        for dtype in (torch.float32, BF16):
            states = empty(REQUESTS + 1, heads, key_dim, value_dim, dtype=dtype)
            recurrence.recurrence_extend(*given, states, *ragged, result)
            if tokens == 8:
                causal_conv.causal_conv_decode(x, *conv, slots, out, *heads_with_norm)
                for num_sms in (1, 1000):
                    recurrence.recurrence_decode(*given, states, slots, result, num_sms)
        groups, weight = (heads, empty(value_dim)) if delta else (key_heads, empty(values))
        normed = result.view(tokens, groups, -1)
        gated_norm.gated_rmsnorm(normed, empty(tokens, values), weight, 1e-6, gate_first=not delta)


def _output_gate(width: int) -> None:
    gated_norm.attention_output_gate(empty(8, width), empty(8, 2 * width)[:, width:])


def _projections(shape: Shape) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """(rows of the stacked modules, columns, bias) of this rank's dense products."""
    dim = shape.head_dims[0]
    if shape.rotary:
        yield (shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim), shape.hidden, shape.bias
        yield (shape.hidden,), shape.heads * dim, False
    if shape.inter:
        yield (shape.inter, shape.inter), shape.hidden, False
        yield (shape.hidden,), shape.inter, False


def _unquantized(shape: Shape) -> Iterator[tuple[int, int, bool]]:
    for rows, cols, bias in _projections(shape):
        yield sum(rows), cols, bias
    yield -(-shape.vocab // shape.tp), shape.hidden, False
    if shape.experts:
        yield shape.experts, shape.hidden, False


def _gemv(rows: int, cols: int, bias: bool) -> None:
    gemv.linear(empty(1, cols), empty(rows, cols), empty(rows) if bias else None)


def linear_weight(rows: Sequence[int], cols: int, scheme: Scheme, static: bool) -> LinearWeight | None:
    """As the loader leaves it, or None for what no checkpoint can hold."""
    held = held_scheme(ModuleQuant(scheme.name, "compressed-tensors", static))
    per_row, per_col = scheme.group
    if (per_row > 1 and any(r % per_row for r in rows[:-1])) or (per_row == 1 and per_col and cols % per_col):
        return None  # scales would be shared between modules, or a group be cut
    total = sum(rows)
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
    for name in HEAD_SCHEMES:
        _products((vocab,), hidden, False, SCHEMES[name], False, arch, torch.float32)


def _products(
    rows: Sequence[int],
    cols: int,
    bias: bool,
    scheme: Scheme,
    static: bool,
    arch: ArchTraits,
    out: torch.dtype = BF16,
) -> None:
    """With every tile of the table, for as many rows of x as it is for and, stepped down to, for many."""
    weight = linear_weight(rows, cols, scheme, static)
    if weight is None:
        return
    held = quant_linear.pack(weight, arch)
    own_bias = empty(sum(rows)) if bias else None
    for tokens in (1, quant_linear.FEW_ROWS):
        quant_linear.few_rows(empty(tokens, cols), held, own_bias, out)
    kind = held.product.kind
    tiles = {int(min(row.max_rows, MANY)): row.tile for row in linear_tiles.tile_rows(kind, arch.features)}
    for tokens, tile in [*tiles.items(), (min(tiles), linear_tiles.last_resort(kind))]:
        for num in {tokens, MANY}:
            quant_linear.many_rows(empty(num, cols), held, own_bias, tile, out)


def _routing(
    experts: int,
    top_k: int,
    score: str,
    groups: tuple[int, int],
    correction: bool,
    shared: bool,
    hashed_vocab: int,
) -> None:
    for valid, dtype, fused in itertools.product(
        (None, empty(1, dtype=torch.int32)), (BF16, torch.float32), {False, shared}
    ):
        logits = empty(100, experts, dtype=dtype)
        if hashed_vocab:
            ids, table = empty(100, dtype=torch.int64), empty(hashed_vocab, top_k, dtype=torch.int32)
            topk.topk_hash(logits, ids, table, score, 1.5, fused, valid)
        if score == "softmax":
            for renormalize in (True, False):
                topk.topk_softmax(logits, top_k, renormalize, 1.0, fused, valid, groups)
        else:
            bias = empty(experts, dtype=torch.float32) if correction else None
            route = getattr(topk, f"topk_{score}")
            route(logits, bias, top_k, True, groups, 2.5, fused, valid)


def _expert_layers(shape: Shape) -> Iterator[tuple[int, int, int, int, Scheme | None, bool, bool]]:
    """(experts, choices, hidden, this rank's share of the intermediate size, scheme, static scales, GPT-OSS's form).
    Biases come in the model's own format only (with activations of either precision); any other experts may be
    quantized in every way."""
    schemes = [None, *SCHEMES.values()]
    if shape.expert_bias:
        schemes = [scheme for scheme in schemes if scheme is None or scheme.name.startswith(shape.expert_scheme)]
    for scheme in schemes:
        try:
            inter = expert_share(shape.expert_inter, shape.tp, scheme)
        except UserError:
            continue  # such a layout is refused
        for shared in {False, shape.shared}:
            for static in (False, True) if scheme and scheme.activation in ("tensor", "nvfp4") else (False,):
                sizes = (shape.experts + shared, shape.top_k + shared, shape.hidden, inter)
                yield (*sizes, scheme, static, shape.expert_bias)


def expert_weights(
    experts: int, rows: int, cols: int, scheme: Scheme | None, static: bool, bias: bool, arch: ArchTraits
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
        empty(experts, *scheme.scale_shape(rows, stored), dtype=SCALE_DTYPES[scheme.scale]),
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
    bias: bool,
    arch: ArchTraits,
) -> None:
    """Few pairs, and all tiles that many may get: of the table, of a tuning file, and what they step down to."""
    w13 = expert_weights(experts, 2 * inter, hidden, scheme, static, bias, arch)
    w2 = expert_weights(experts, hidden, inter, scheme, static, bias, arch)
    act = GPT_OSS_SWIGLU if bias else SILU
    kind = product_of(scheme, arch.features).tile_kind
    rungs = [*tile_rows(kind, arch.features), last_resort(kind)]
    tuned = find(experts, inter, scheme.name if scheme else None, arch, hidden=hidden, bias=bias).tiles
    pairs = {str(pair): pair for pair in tuned.by_tokens.values()} if tuned else {}
    rungs += [MoeTiles(float("inf"), pair.gate_up, pair.down) for pair in pairs.values()]
    for tokens, rung in [(1, None), (MANY, rungs[0]), *((16, rung) for rung in rungs)]:
        x, weights = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32)
        moe.fused_moe(x, w13, w2, weights, empty(tokens, top_k, dtype=torch.int32), act, rung, arch.features)
    if scheme is SCHEMES["mxfp4_mxfp8"] and "mma_sync_block_scale" in arch.features:
        with patch.multiple(mixed_moe, _library=NoLibrary, _stream=lambda x: 0):
            for pairs_an_expert in (mixed_moe.LEAST_ROWS, mixed_moe.TALL_ROWS):
                tokens = -(-pairs_an_expert * experts // top_k)
                x, weights = empty(tokens, hidden), empty(tokens, top_k, dtype=torch.float32)
                mixed_moe.fused_moe(x, w13, w2, weights, empty(tokens, top_k, dtype=torch.int32), act)


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
