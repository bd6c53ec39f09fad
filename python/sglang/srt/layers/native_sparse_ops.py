"""Ops of sparse attention in plain torch: the CPU's kernels, and the reference that others are tested against.

An indexer scores every entry that a token sees with a few small heads and keeps the best (DeepSeek-V3.2, arXiv
2512.02556, section 2.1); attention reads those alone. Math is done in fp32, and in fp64 where the queries are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.native_ops import apply_rope
from sglang.srt.layers.ops import SparseAttentionOp, SparseIndexerOp

INDEX_DIM = 128
"""Columns of an index key."""
E4M3_MAX = 448.0
LEAST_PEAK = 1e-4
"""Least value taken for the largest number that a group is divided by, so that zeros have a scale as well."""

LATENT_RANK, LATENT_ROPE, LATENT_GROUP = 512, 64, 128
PACKED_LATENT_BYTES = 656
"""512 e4m3 numbers, a scale in fp32 for each 128 of them, 64 rotary columns in bfloat16."""


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """[size, size] fp32, Sylvester's construction, orthogonal: divided by sqrt(size), a power of two. Its own
    inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def hadamard_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., 128] -> x turned by Hadamard's matrix, which spreads outliers over all columns, as e4m3 [..., 128] and
    scales [...] fp32: x turned is about e4m3 times scale."""
    rotated = x.float() @ hadamard(x.shape[-1]).to(x.device)
    scales = rotated.abs().amax(-1).clamp(min=LEAST_PEAK) / E4M3_MAX
    return (rotated / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def index_key_store(
    keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, out_cache_loc: torch.Tensor
) -> None:
    """keys [T, 128] into cache [S, 1, 128] at out_cache_loc [T]; negative places are left out. With scales [S, 1] fp32
    the cache is e4m3, and keys are turned by Hadamard's matrix before they are quantized, each by its largest number;
    without, keys keep their values and take the cache's type."""
    stored = out_cache_loc >= 0
    at, keys = out_cache_loc[stored], keys[stored]
    if scales is None:
        cache[at, 0] = keys.to(cache.dtype)
        return
    quantized, key_scales = hadamard_e4m3(keys)
    cache.view(torch.uint8)[at, 0] = quantized.view(torch.uint8)
    scales[at, 0] = key_scales


def index_norm_rope(
    keys: torch.Tensor,
    queries: torch.Tensor | None,
    first_query: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    is_neox_style: bool = True,
) -> torch.Tensor:
    """keys [T, D] -> [T, D], with a norm of mean 0 (weight, bias [D] fp32) and the first rot dims rotated; queries
    [N, H, D] of the tokens from `first_query` on are rotated in place. positions [T]; cos_sin [max_pos, rot] fp32."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    normed = torch.nn.functional.layer_norm(keys.float(), weight.shape, weight, bias, eps).to(keys.dtype)
    if queries is not None:
        tokens = slice(first_query, first_query + len(queries))
        queries.copy_(apply_rope(queries, cos[tokens], sin[tokens], is_neox_style))
    return apply_rope(normed[:, None], cos, sin, is_neox_style)[:, 0].to(keys.dtype)


def index_queries(
    q: torch.Tensor, weights: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, 128] and head weights [T, H] -> queries [T, H, 128] of `dtype`, the index cache's, and weights [T, H]
    fp32 into which `scale` and, of e4m3, the queries' scales are multiplied: all scales are positive, so that they may
    follow the ReLU. e4m3 queries are turned by Hadamard's matrix, as keys are."""
    weights = weights.float() * scale
    if dtype != torch.float8_e4m3fn:
        return q.to(dtype), weights
    quantized, scales = hadamard_e4m3(q)
    return quantized, weights * scales


def index_logits(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, rows: EntryRows
) -> torch.Tensor:
    """q [T, H, 128] and weights [T, H] of `index_queries`, keys [S, 1, 128] and scales [S, 1] of `index_key_store` ->
    [T, rows.max_count]: of entry s with key k, sum over h of weights[h] * relu(q[h] . k); -inf for what a token does
    not see."""
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    slots = rows.all().slots
    logits = torch.full(slots.shape, float("-inf"), dtype=math_dtype, device=q.device)
    for piece in pieces(slots.shape, keys.shape[2]):
        at = slots[piece].clamp(min=0).long()
        key = keys[at, 0].to(math_dtype)
        if scales is not None:
            key *= scales[at, 0][..., None]
        scores = torch.relu(q[piece].to(math_dtype) @ key.transpose(1, 2))  # [t, H, N]
        logits[piece] = (weights[piece, None].to(math_dtype) @ scores)[:, 0]
    return logits.masked_fill(slots < 0, float("-inf"))


_MOST_ELEMENTS = 1 << 24
"""Number of elements, entries times their columns, that are gathered at once at most."""


def pieces(shape: torch.Size, dim: int) -> Iterator[slice]:
    """Runs of tokens whose entries, shape [T, K] of `dim` columns, are so many at most; one token at least."""
    tokens, entries = shape
    step = max(1, _MOST_ELEMENTS // max(1, entries * dim))
    yield from (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def top_entries(logits: torch.Tensor, counts: torch.Tensor, top_k: int) -> torch.Tensor:
    """logits [T, N], of which the first counts [T] are -> [T, top_k] int32: the entries with the largest logits in
    ascending order, of equal ones the first; -1 behind them. Where there are no more than top_k, all."""
    seen = torch.arange(logits.shape[1], device=logits.device) < counts[:, None]
    order = logits.masked_fill(~seen, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    width = order.shape[1]
    chosen = torch.where(torch.arange(width, device=logits.device) < counts[:, None], order, logits.shape[1])
    chosen = chosen.sort(dim=1).values
    chosen = torch.where(chosen < logits.shape[1], chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, top_k - width), value=-1)


def sparse_indexer(plan: object) -> SparseIndexerOp:
    """Every entry is scored, also where no choice is to be made."""

    def select(
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        rows: EntryRows,
        top_k: int,
    ) -> Selection:
        """-> the slots [T, top_k] of the entries that `top_entries` keeps by `index_logits`."""
        entries = top_entries(index_logits(q, weights, keys, scales, rows), rows.counts, top_k)
        return Selection(rows.slots_of(entries), rows.counts.clamp(max=top_k))

    return select


def pack_latents(entries: torch.Tensor) -> torch.Tensor:
    """entries [N, 576] of 16 bits or more -> [N, 656] uint8: the first 512 columns as e4m3, four scales in fp32 (the
    largest of 128 columns is 448 times its scale), the last 64 columns in bfloat16."""
    latent, rotary = entries.float().split((LATENT_RANK, LATENT_ROPE), dim=-1)
    groups = latent.unflatten(-1, (-1, LATENT_GROUP))
    scales = groups.abs().amax(-1).clamp(min=LEAST_PEAK) / E4M3_MAX
    numbers = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = (numbers.flatten(-2), scales, rotary.to(torch.bfloat16).contiguous())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def unpack_latents(packed: torch.Tensor) -> torch.Tensor:
    """[N, 656] uint8 -> [N, 576] fp32."""
    numbers, scales, rotary = (
        part.contiguous().view(dtype).float()
        for part, dtype in zip(
            packed.split((LATENT_RANK, 4 * LATENT_RANK // LATENT_GROUP, 2 * LATENT_ROPE), dim=-1),
            (torch.float8_e4m3fn, torch.float32, torch.bfloat16),
            strict=True,
        )
    )
    latent = numbers.unflatten(-1, (-1, LATENT_GROUP)) * scales[..., None]
    return torch.cat((latent.flatten(-2), rotary), dim=-1)


def latent_pack_store(entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
    """entries [T, 576] into cache [S, 1, 656] uint8 at out_cache_loc [T], packed."""
    cache[out_cache_loc, 0] = pack_latents(entries)


def sparse_attention(plan: object) -> SparseAttentionOp:
    """Some tokens after others: no copy of all that is selected."""
    return attend_selected


def attend_selected(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """q [T, H, D] -> out [T, H, Dv]: softmax over all that is selected in one or two caches, whose entries are keys
    with the first Dv columns as values. Caches are [S, 1, D] of 16 bits or more, or [S, 1, 656] uint8 (`pack_latents`,
    D 576, Dv 512). sinks [H] fp32: one more logit a head, without a value. lse [T, H] fp32 takes the natural logarithm
    of the sum of the exponentials, the sink's among them. A token without entries gives zeros, and -inf without a
    sink."""
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    width = sum(selection.slots.shape[1] for _, selection in sources)
    for piece in pieces(torch.Size((len(q), width)), q.shape[2]):
        parts = [_selected(cache, selection, piece, math_dtype) for cache, selection in sources]
        keys, kept = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        scores = (q[piece].to(math_dtype) @ keys.transpose(1, 2)) * scale  # [t, H, K]
        scores = scores.masked_fill(~kept[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[None, :, None].to(math_dtype).expand(len(scores), -1, 1)), dim=2)
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp().nan_to_num(0.0)[..., :width]
        out[piece] = (weights @ keys[..., : out.shape[2]]).to(out.dtype)
        if lse is not None:
            lse[piece] = total


def _selected(
    cache: torch.Tensor, selection: Selection, piece: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries [t, K, D] of some tokens, zeros where there are none, and which there are [t, K]."""
    slots = selection.slots[piece]
    kept = (slots >= 0) & (torch.arange(slots.shape[1], device=slots.device) < selection.counts[piece, None])
    entries = cache[torch.where(kept, slots, 0).long(), 0]
    if cache.dtype == torch.uint8:
        entries = unpack_latents(entries.flatten(0, 1)).unflatten(0, slots.shape)
    return entries.to(dtype).masked_fill(~kept[..., None], 0.0), kept
