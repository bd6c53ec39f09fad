"""Ops of sparse attention in plain torch: the CPU kernels, and the reference for tests.

An indexer scores every visible entry with a few small heads and selects the best (DeepSeek-V3.2, arXiv 2512.02556,
section 2.1); attention reads only those. Math is done in fp32, or in fp64 for fp64 queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.native_latent_records import unpack_records
from sglang.srt.layers.native_ops import apply_rope
from sglang.srt.plan.latent_record import LatentRecord

INDEX_DIM = 128
"""Columns of an index key."""
E4M3_MAX = 448.0
MIN_PEAK = 1e-4
"""Lower bound of a group's largest magnitude when its scale is computed, so that zeros have a scale too."""

LATENT_RANK, LATENT_ROPE, LATENT_GROUP = 512, 64, 128
PACKED_LATENT_BYTES = 656
"""512 e4m3 numbers, a scale in fp32 for each 128 of them, 64 rotary columns in bfloat16."""


@functools.cache
def hadamard(size: int) -> torch.Tensor:
    """Returns the orthogonal Hadamard matrix [size, size] fp32 (Sylvester's construction divided by sqrt(size), size a
    power of two), which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def hadamard_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x [..., 128] times the Hadamard matrix, which spreads outliers over all columns, as e4m3 [..., 128] and
    scales [...] fp32."""
    rotated = x.float() @ hadamard(x.shape[-1]).to(x.device)
    scales = rotated.abs().amax(-1).clamp(min=MIN_PEAK) / E4M3_MAX
    return (rotated / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def index_key_store(
    keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, out_cache_loc: torch.Tensor
) -> None:
    """Stores keys [T, 128] into cache [S, 1, 128] at out_cache_loc [T], skipping negative places. With scales [S, 1]
    fp32 the cache is e4m3: keys are multiplied by the Hadamard matrix and quantized with one scale each. Without, they
    are cast to the cache's dtype."""
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
    first_rotary: int = 0,
) -> torch.Tensor:
    """Returns keys [T, D] after a layer norm (weight, bias [D] fp32) with rot dims from `first_rotary` on rotated;
    rotates queries [N, H, D] of the tokens from `first_query` on in place. positions [T]; cos_sin [max_pos, rot]
    fp32."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    normed = torch.nn.functional.layer_norm(keys.float(), weight.shape, weight, bias, eps).to(keys.dtype)
    if queries is not None:
        tokens = slice(first_query, first_query + len(queries))
        rotated = queries[..., first_rotary:]
        rotated.copy_(apply_rope(rotated, cos[tokens], sin[tokens], is_neox_style))
    of_keys = apply_rope(normed[:, None, first_rotary:], cos, sin, is_neox_style)[:, 0].to(keys.dtype)
    return torch.cat((normed[:, :first_rotary], of_keys), dim=1) if first_rotary else of_keys


def index_queries(
    q: torch.Tensor, weights: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries [T, H, 128] in `dtype`, the index cache's, and head weights [T, H] fp32 times `scale`. e4m3
    queries are multiplied by the Hadamard matrix as keys are, and their scales are folded into the weights, which is
    exact because positive scales commute with the ReLU."""
    weights = weights.float() * scale
    if dtype != torch.float8_e4m3fn:
        return q.to(dtype), weights
    quantized, scales = hadamard_e4m3(q)
    return quantized, weights * scales


def index_logits(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None, rows: EntryRows
) -> torch.Tensor:
    """Returns [T, rows.max_count]: for each entry with key k the sum over h of weights[h] * relu(q[h] . k); -inf for
    entries that a token does not see. q [T, H, 128], weights [T, H] from `index_queries`; keys [S, 1, 128], scales [S,
    1] from `index_key_store`."""
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
"""Most elements, entries times columns, gathered at once."""


def pieces(shape: torch.Size, dim: int) -> Iterator[slice]:
    """Yields runs of tokens whose entries, shape [T, K] of `dim` columns, stay below _MOST_ELEMENTS; at least one token
    each."""
    tokens, entries = shape
    step = max(1, _MOST_ELEMENTS // max(1, entries * dim))
    yield from (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def top_entries(logits: torch.Tensor, counts: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns [T, top_k] int32: the entries with the largest of the first counts [T] logits [T, N], in ascending order;
    of equal ones the first; -1 after the last. Rows with at most top_k entries keep all."""
    seen = torch.arange(logits.shape[1], device=logits.device) < counts[:, None]
    order = logits.masked_fill(~seen, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    width = order.shape[1]
    chosen = torch.where(torch.arange(width, device=logits.device) < counts[:, None], order, logits.shape[1])
    chosen = chosen.sort(dim=1).values
    chosen = torch.where(chosen < logits.shape[1], chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, top_k - width), value=-1)


def sparse_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    rows: EntryRows,
    top_k: int,
) -> Selection:
    """Returns the slots [T, top_k] of the entries that `top_entries` keeps by `index_logits`. Scores every entry, even
    if all are selected."""
    entries = top_entries(index_logits(q, weights, keys, scales, rows), rows.counts, top_k)
    return Selection(rows.slots_of(entries), rows.counts.clamp(max=top_k))


def pack_latents(entries: torch.Tensor) -> torch.Tensor:
    """Returns entries [N, 576] of 16 bits or more packed as [N, 656] uint8: the first 512 columns as e4m3, four fp32
    scales (448 times a scale is the largest of its 128 columns), the last 64 columns in bfloat16."""
    latent, rotary = entries.float().split((LATENT_RANK, LATENT_ROPE), dim=-1)
    groups = latent.unflatten(-1, (-1, LATENT_GROUP))
    scales = groups.abs().amax(-1).clamp(min=MIN_PEAK) / E4M3_MAX
    numbers = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = (numbers.flatten(-2), scales, rotary.to(torch.bfloat16).contiguous())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def unpack_latents(packed: torch.Tensor) -> torch.Tensor:
    """Returns packed latents [N, 656] uint8 as [N, 576] fp32."""
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


def attend_selected(
    q: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, Selection]],
    out: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    record: LatentRecord | None = None,
    record_scale: float = 1.0,
) -> None:
    """Fills out [T, H, Dv] with the attention of q [T, H, D] over the selected entries of one or two caches; an entry
    is a key, and its first Dv columns are the value. Caches are [S, 1, D] of 16 bits or more, or uint8: records
    (`record`) whose numbers are values divided by `record_scale`, or [S, 1, 656] (`pack_latents`, D 576, Dv 512). sinks
    [H] fp32: one more logit per head, without a value. lse [T, H] fp32 receives the natural log-sum-exp, the sink
    included. A token without entries gets zeros, and lse -inf without a sink."""
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    unpack = unpack_latents
    if record is not None:
        unpack = functools.partial(unpack_records, record=record, scale=record_scale)
    width = sum(selection.slots.shape[1] for _, selection in sources)
    for piece in pieces(torch.Size((len(q), width)), q.shape[2]):
        parts = [_selected(cache, selection, piece, math_dtype, unpack) for cache, selection in sources]
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
    cache: torch.Tensor,
    selection: Selection,
    piece: slice,
    dtype: torch.dtype,
    unpack: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the selected entries [t, K, D] of some tokens, zeros where there is none, and the mask [t, K] of existing
    ones. `unpack`: makes entries of those that are bytes."""
    slots = selection.of(piece)
    kept = (slots >= 0) & (torch.arange(slots.shape[1], device=slots.device) < selection.counts[piece, None])
    entries = cache[torch.where(kept, slots, 0).long(), 0]
    if cache.dtype == torch.uint8:
        entries = unpack(entries.flatten(0, 1)).unflatten(0, slots.shape)
    return entries.to(dtype).masked_fill(~kept[..., None], 0.0), kept


def attend_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    selection: Selection,
    lens: torch.Tensor,
    block: int,
    out: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Fills out [T, Hq, Dv] with the attention of q [T, Hq, D], each query head over the selected blocks of its KV
    head. It covers all tokens of these blocks except those after the query in the last one.

    Caches [S, Hkv, D] and [S, Hkv, Dv] hold real values divided by k_scale and v_scale. `selection`: rows of block
    numbers (slot / block) for each token and KV head, [T * Hkv], or for each token, [T]; the last one in a row must be
    the block that contains the query. lens [T] int32: tokens of the request up to and including the query; 0: nothing
    is seen, and the result is zero. Tokens are computed in pieces, so that the selected keys are never copied all at
    once.
    """
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads, tokens = k_cache.shape[1], len(q)
    groups = selection.slots.unflatten(0, (tokens, -1))  # [T, G, K]
    counts = selection.counts.unflatten(0, (tokens, -1))
    inside = torch.arange(block, device=q.device)
    width = groups.shape[1] * groups.shape[2] * block * kv_heads
    for piece in pieces(torch.Size((tokens, width)), q.shape[2]):
        number = torch.arange(groups.shape[2], device=q.device)
        kept = number < counts[piece, :, None]
        last = number == counts[piece, :, None] - 1
        rest = (lens[piece] - 1) % block + 1
        seen = kept[..., None] & (~last[..., None] | (inside < rest[:, None, None, None]))
        seen &= (lens[piece] > 0)[:, None, None, None]
        slots = (groups[piece].clamp(min=0).long()[..., None] * block + inside).flatten(2)  # [t, G, N]
        seen = seen.flatten(2).expand(-1, kv_heads, -1)
        slots = slots.expand(-1, kv_heads, -1)
        heads = torch.arange(kv_heads, device=q.device)[None, :, None]
        keys, values = (
            cache[slots, heads].to(math_dtype).masked_fill(~seen[..., None], 0.0) * factor
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        queries = q[piece].to(math_dtype).unflatten(1, (kv_heads, -1))  # [t, Hkv, group, D]
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~seen[:, :, None], float("-inf"))
        out[piece] = (scores.softmax(-1).nan_to_num(0.0) @ values).flatten(1, 2).to(out.dtype)
