"""The selection of blocks of tokens in plain torch: the CPU kernel, and the reference for tests.

Tokens are read in blocks of neighbours: positions 0 to B - 1 of a request are block 0, and so on. The tokens of a block
have consecutive slots from a multiple of B on, so one number gives a block's place. Math is done in fp32, or in fp64
for fp64 queries. Source: MiniMax-M3.
"""

from __future__ import annotations

import torch

from sglang.srt.kernels.op import Op
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


BLOCK_INDEXER = Op("block_indexer", block_indexer)
