"""The ops of decoder layers in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32 and cast back to the input's dtype; matrix products run in the dtype of their operands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.configs.activation import GELU, GELU_TANH, Activation
from sglang.srt.layers.moe.expert_weights import ExpertWeights, Waves
from sglang.srt.layers.moe.output_norm import OutputNorm, normed_outputs
from sglang.srt.layers.moe.pair_adapters import PairAdapters
from sglang.srt.layers.native_fp4 import dequantize_fp4_rows, quantize_fp4_rows
from sglang.srt.layers.quantization.activations import Activations, values_of

if TYPE_CHECKING:
    from sglang.srt.hardware.arch import ArchTraits
    from sglang.srt.kernels.tile_configs import TileConfigs
    from sglang.srt.layers.quantization.linear_weight import LinearWeight, QuantizedProduct


WIDENED_ELEMENTS = 1 << 20
"""Weight elements that a CPU converts to fp32 at a time, so that they stay in its caches."""
LSE_BYTES = 16
"""Bytes behind the columns of a `pack_parts` row that hold the log-sum-exp; 16 keep rows aligned."""


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns x [..., K] times w [N, K] transposed plus bias [N], [..., N]. With `out_dtype` fp32 (x [R, K]) sums are
    not rounded to x's dtype; then w may be fp32, and only with an fp32 w a bias is allowed."""
    if w.dtype != x.dtype:
        return F.linear(x.to(w.dtype), w, bias)
    if out_dtype in (None, x.dtype):
        return F.linear(x, w, bias)
    assert bias is None and out_dtype is torch.float32
    if x.is_cuda:
        return torch.mm(x, w.T, out_dtype=torch.float32)
    x32 = x.float()
    rows = max(1, WIDENED_ELEMENTS // w.shape[1])
    return torch.cat([F.linear(x32, part.float()) for part in w.split(rows)], dim=-1)


def quantized_linear(weight: LinearWeight, arch: ArchTraits, configs: TileConfigs) -> QuantizedProduct:
    """Returns the product op of a quantized weight [N, K], which is dequantized for each product. Activations are not
    quantized, since that serves tensor cores that a CPU does not have."""

    def run(x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        values = values_of(x)
        return linear(values, weight.dequantized().to(values.dtype), bias, out_dtype)

    return run


def embedding_rows(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Returns [T, H] of ids [T] from weight [N, H], the rows of tokens from `first` on; zeros for other tokens."""
    row = ids - first
    is_local = (row >= 0) & (row < weight.shape[0])
    return F.embedding(torch.where(is_local, row, 0), weight) * is_local[:, None]


def decode_inputs(
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    next_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Builds the inputs of a decode step of B requests and writes the new slots into the first table. Returns input ids
    and positions [B], and the slots in the other tables [W, B], int64. slots, out_cache_loc [B] int64; seq_lens [B]
    int32, with the new token; next_tokens [R] int64; req_to_token [1 + W, R, context] int32."""
    positions = seq_lens.to(torch.int64) - 1
    req_to_token[0, slots, positions] = out_cache_loc.to(torch.int32)
    return next_tokens[slots], positions, req_to_token[1:, slots, positions].to(torch.int64)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMS norm [..., H] of x [..., H], times weight [H]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of x + residual, x + residual), each [T, H]."""
    residual = x + residual
    return rmsnorm(residual, weight, eps), residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(first half) * second half [..., I] of x [..., 2I]."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns gelu(first half) * second half [..., I] of x [..., 2I], with the tanh form of gelu."""
    return gated(x, GELU)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    """Returns x [T, heads, D] rotated, in fp32; cos and sin [T, rot_dim / 2] fp32; dims from rot_dim on are unchanged.

    Pairs that rotate together: (i, i + rot_dim / 2), or (2i, 2i + 1) unless `is_neox_style`.
    """
    rot_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rot_dim].float(), x[..., rot_dim:].float()
    cos, sin = cos[:, None], sin[:, None]
    if not is_neox_style:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((torch.stack(pair, dim=-1).flatten(-2), rest), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def pack_parts(parts: torch.Tensor, lse: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns a message [ranks, T, H, D + extra] with each rank's heads of partial outputs parts [T, ranks * H, D] and
    natural log-sum-exps lse [T, ranks * H] fp32. Behind a row's columns are 16 bytes with the log-sum-exp, as the sum
    of three numbers of the parts' dtype. Parts with log-sum-exp -inf become zeros."""
    parts = parts.masked_fill((lse == float("-inf"))[..., None], 0)
    num_tokens, heads_of_all, dims = parts.shape
    shape = (num_tokens, ranks, heads_of_all // ranks)
    message = parts.new_zeros((ranks, num_tokens, shape[2], dims + LSE_BYTES // parts.element_size()))
    message[..., :dims] = parts.view(*shape, dims).transpose(0, 1)
    rest = lse
    for column in range(dims, dims + 3):
        rounded = rest.to(parts.dtype)
        message[..., column] = rounded.view(shape).transpose(0, 1)
        rest = torch.where(rounded == float("-inf"), 0.0, rest - rounded.float())
    return message


def merge_parts(received: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fills out [T, H, D] with the merged messages received [ranks, T, H, D + extra] of `pack_parts`; zeros if no rank
    has a token. sinks [H] fp32: one more logit per head, without a value."""
    dims = out.shape[2]
    lse = received[..., dims : dims + 3].float().sum(-1)
    if sinks is not None:
        lse = torch.cat((lse, sinks.to(lse.dtype).expand(lse.shape[1:])[None]))
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp()
    total = weights.sum(0)
    weights = weights[: len(received)] / total.masked_fill(total == 0.0, 1.0)
    out.copy_((received[..., :dims] * weights[..., None]).sum(0))


def load_cache(
    cache: torch.Tensor, loc: torch.Tensor, scale: float, group_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [..., H, D] of cache [slots, H, D] at loc [...], times `scale` in fp32 if the cache is fp8. With group
    scales [slots, H, D / 16] the cache holds codes [slots, H, D / 2]."""
    if group_scales is not None:
        return dequantize_fp4_rows(_rows_at(cache, loc), _rows_at(group_scales, loc), scale)
    if cache.element_size() > 1:
        return _rows_at(cache, loc)
    # Not every device can gather float8, but all can gather bytes.
    return _rows_at(cache.view(torch.uint8), loc).view(cache.dtype).float() * scale


def _rows_at(cache: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
    """Returns cache [slots, ...] at loc [...]."""
    return cache.flatten(1).index_select(0, loc.flatten()).view(*loc.shape, *cache.shape[1:])


def store_cache(
    cache: torch.Tensor, x: torch.Tensor, loc: torch.Tensor, scale: float, group_scales: torch.Tensor | None = None
) -> None:
    """Stores x / scale [T, H, D] at loc [T] of cache [slots, H, D], saturating if the cache is fp8. With group scales
    [slots, H, D / 16] the cache holds codes [slots, H, D / 2]."""
    if group_scales is not None:
        cache[loc], group_scales[loc] = quantize_fp4_rows(x, scale)
        return
    if cache.element_size() > 1:
        cache[loc] = x.to(cache.dtype)
        return
    limit = torch.finfo(cache.dtype).max
    quantized = (x.float() / scale).clamp(-limit, limit).to(cache.dtype)
    # Indexed stores of fp8 are not implemented everywhere; the bytes are.
    cache.view(torch.uint8)[loc] = quantized.view(torch.uint8)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x) squared."""
    return F.relu(x).square()


def gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns (up + offset) * gate * sigmoid(alpha * gate) [..., I] of x [..., 2I] (gate, up), clamped as `activation`
    says, or up * gelu(gate)."""
    if not activation.gated:
        return relu2(x)
    gate, up = x.float().chunk(2, dim=-1)
    if activation.function == GELU_TANH:
        return (up * F.gelu(gate, approximate="tanh")).to(x.dtype)
    limit = activation.limit
    if limit is not None and not activation.limits_result:
        gate = gate.clamp(max=limit)
    result = gate * torch.sigmoid(activation.alpha * gate)
    if limit is not None:
        up = up.clamp(-limit, limit)
        result = result.clamp(max=limit) if activation.limits_result else result
    return ((up + activation.up_offset) * result).to(x.dtype)


def fused_moe(
    x: Activations,
    w13: ExpertWeights,
    w2: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    configs: TileConfigs,
    features: Collection[str] = (),
    waves: Waves | None = None,
    adapters: PairAdapters | None = None,
    norm: OutputNorm | None = None,
) -> torch.Tensor:
    """Returns the experts' weighted outputs [T, H] for x [T, H], w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H,
    I], weights and ids [T, k].

    An id of -1 adds nothing. Weights are dequantized; activations are not quantized, since that serves tensor cores
    that a CPU does not have. `waves`, `adapters`, `norm`: as in `fused_moe_triton`.
    """
    x = values_of(x)
    if adapters is not None:
        parts = ((w13, w2, topk_ids),) if waves is None else waves
        return _adapted_experts(x, parts, w13.rows, topk_weights, topk_ids, activation, adapters, norm)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    scales = topk_weights.float().flatten()
    for up, down, ids in ((w13, w2, topk_ids),) if waves is None else waves:
        _add_experts(x, up, down, scales, ids, activation, norm, out)
    return out.to(x.dtype)


def _add_experts(
    x: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    scales: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    norm: OutputNorm | None,
    out: torch.Tensor,
) -> None:
    for row, places in _pairs_of_rows(topk_ids, w13):
        if len(x) == len(places) == 1:  # of one request that decodes: gathering takes longer than multiplying
            y = normed_outputs(_of_expert(gated(_of_expert(x, w13, row), activation), w2, row), norm)
            out += y.float() * scales[places[0]]
            continue
        chosen_by = torch.tensor(places, device=x.device)
        token = chosen_by // topk_ids.shape[1]
        y = normed_outputs(_of_expert(gated(_of_expert(x[token], w13, row), activation), w2, row), norm)
        out.index_add_(0, token, y.float() * scales[chosen_by, None])


def _adapted_experts(
    x: torch.Tensor,
    waves: Waves,
    width: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    adapters: PairAdapters,
    norm: OutputNorm | None,
) -> torch.Tensor:
    """Computes all experts of a product before the next one, so that adapters can add to each of both."""

    def products(x: torch.Tensor, number: int, out: torch.Tensor, per_row: int) -> None:
        for *pair, ids in waves:
            for row, places in _pairs_of_rows(ids, pair[number]):
                rows = torch.tensor([place // per_row for place in places], device=x.device)
                out[places] = _of_expert(x[rows], pair[number], row)

    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    both = x.new_zeros((num_pairs, width))
    products(x, 0, both, top_k)
    pairs = adapters.order(topk_ids)
    adapters.add_up(x, both, pairs)
    inter, out = gated(both, activation), x.new_zeros((num_pairs, x.shape[1]))
    products(inter, 1, out, 1)
    adapters.add_down(inter, out, pairs)
    out = normed_outputs(out, norm)
    weighted = out.float().view(*topk_ids.shape, -1) * topk_weights.float()[..., None]
    return weighted.masked_fill(topk_ids[..., None] < 0, 0.0).sum(1).to(x.dtype)


def _of_expert(x: torch.Tensor, weights: ExpertWeights, row: int) -> torch.Tensor:
    bias = None if weights.bias is None else weights.bias[row].to(x.dtype)
    return F.linear(x, weights.dequantized(row).to(x.dtype), bias)


def _pairs_of_rows(ids: torch.Tensor, weights: ExpertWeights) -> Iterator[tuple[int, list[int]]]:
    """Yields the row of each expert that ids [T, k] name, with the numbers of its pairs."""
    chosen: dict[int, list[int]] = {}
    for place, expert in enumerate(ids.flatten().tolist()):
        chosen.setdefault(expert, []).append(place)
    row_of = range(weights.num_experts) if weights.row_of_expert is None else weights.row_of_expert.tolist()
    for expert in sorted(chosen.keys() - {-1}):
        yield row_of[expert], chosen[expert]


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    start_loc: torch.Tensor,
    *,
    longest: int,
    is_causal: bool,
    scale: float | None = None,
    sliding_window: int = 0,
    share: tuple[int, int] = (0, 1),
    tile: object,
) -> None:
    """Fills o [T, Hq, Dv] for q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] without a cache; sequence i has rows
    start_loc[i] to start_loc[i + 1]. `longest`, the rows of the longest sequence, is not read. sliding_window: a row
    sees those that are fewer rows away, without causality on both sides; 0: all. share (i, n), without causality: fills
    only the i-th of n ranges of rows."""
    starts = start_loc.tolist()
    first, last = (len(q) * (share[0] + i) // share[1] for i in (0, 1))
    assert share[1] == 1 or not is_causal
    for begin, end in pairwise(starts):
        low, high = max(begin, first), min(end, last)
        if low >= high:
            continue
        query, key, value = (x.transpose(0, 1) for x in (q[low:high], k[begin:end], v[begin:end]))
        mask = None
        if sliding_window:
            ahead = torch.arange(begin, end, device=q.device) - torch.arange(low, high, device=q.device)[:, None]
            mask = (ahead.abs() < sliding_window) & (ahead <= 0 if is_causal else True)
        o[low:high] = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=True
        ).transpose(0, 1)
