"""Ops of block-sparse attention in plain torch: the CPU kernels, and the reference for tests.

Tokens are read in blocks of neighbours: positions 0 to B - 1 of a request are block 0, and so on. The tokens of a block
have consecutive slots from a multiple of B on, so one number gives a block's place. Math is done in fp32, or in fp64
for fp64 queries. Source: MiniMax-M3.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.native_sparse_ops import pieces, top_entries


def block_scores(q: torch.Tensor, keys: torch.Tensor, rows: EntryRows, block: int, local_blocks: int) -> torch.Tensor:
    """Returns block scores [T, H, blocks] for q [T, H, D], keys [S, 1, D]: the largest q . k of a block's visible
    tokens; infinity for the last `local_blocks` blocks that a token sees, -infinity for blocks that it does not see."""
    math_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    slots = rows.all().slots
    tokens, width = slots.shape
    scores = torch.full((tokens, q.shape[1], -(-width // block) * block), float("-inf"), dtype=math_dtype)
    scores = scores.to(q.device)
    for piece in pieces(slots.shape, keys.shape[2]):
        at = slots[piece].clamp(min=0).long()
        products = q[piece].to(math_dtype) @ keys[at, 0].to(math_dtype).transpose(1, 2)
        scores[piece, :, :width] = products.masked_fill(slots[piece, None] < 0, float("-inf"))
    scores = scores.unflatten(-1, (-1, block)).amax(-1)
    last = (rows.counts + (block - 1)) // block
    number = torch.arange(scores.shape[2], device=q.device)
    local = (number >= last[:, None] - local_blocks) & (number < last[:, None])
    return scores.masked_fill(local[:, None], float("inf"))


def block_indexer(
    q: torch.Tensor,
    keys: torch.Tensor,
    rows: EntryRows,
    blocks: EntryRows,
    top_blocks: int,
    local_blocks: int,
) -> Selection:
    """Returns for each token and head, [T * H] rows, the block numbers (slot / block) of the `top_blocks` blocks with
    the largest `block_scores` in ascending order; of equal ones the first. `blocks` are those of `rows` for the heads
    of q. Scores every block, even if all are selected."""
    scores = block_scores(q, keys, rows, blocks.rate, local_blocks).flatten(0, 1)
    chosen = top_entries(scores, blocks.counts, top_blocks)
    return Selection(blocks.slots_of(chosen), blocks.counts.clamp(max=top_blocks))


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
