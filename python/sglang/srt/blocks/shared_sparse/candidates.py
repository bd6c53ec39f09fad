"""The first level of a two-level indexer: it selects runs of entries by their best entry; then entries are selected in
these.

Sources: as `layer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang.srt.kernels.op import Op
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.native_sparse_ops import index_logits, top_entries

WITHIN_AT_ONCE = 512
"""Number of tokens whose candidate slots are in memory at once."""


def runs_of(rows: EntryRows, block: int) -> EntryRows:
    """Returns the runs that each token sees, the unfinished one included."""
    counts = (rows.counts + (block - 1)) // block
    most = -(-rows.max_count // block)
    return EntryRows(rows.req_to_token, rows.req_pool_indices, counts, most, rows.rate * block, rows.run)


def best_of_runs(logits: torch.Tensor, counts: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the best logit of each run [T, N / block], infinity for the last run with an entry. logits [T, N], N a
    multiple of block, of which the first counts [T] are valid; overwritten."""
    entry = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    best = logits.masked_fill_(entry >= counts[:, None], float("-inf")).unflatten(1, (-1, block)).amax(-1)
    last_run = (counts[:, None] - 1) // block
    return best.masked_fill_(entry[: best.shape[1]] == last_run, float("inf"))


def candidate_blocks(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    rows: EntryRows,
    block: int,
    top: int,
) -> Selection:
    """Returns for each token the `top` runs of `block` entries with the best entry by `index_logits`, in ascending
    order, the token's own among them: slots [T, top] of runs; a run's slot times `block` is that of its first entry.
    Tokens that see no more runs get all. q [T, H, D], weights [T, H] from `index_queries`, keys [S, 1, D], and the
    scales [S, 1] of quantized keys."""
    logits, runs = index_logits(q, weights, keys, scales, rows), runs_of(rows, block)
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % block), value=float("-inf"))
    chosen = top_entries(best_of_runs(padded, rows.counts, block), runs.counts, top)
    return Selection(runs.slots_of(chosen), runs.counts.clamp(max=top))


CANDIDATE_BLOCKS = Op("candidate_blocks", candidate_blocks)


def choose_within(
    select: Callable[..., Selection],
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    rows: EntryRows,
    runs: Selection,
    block: int,
    top_k: int,
) -> Selection:
    """Returns each token's best `top_k` entries in the runs of `candidate_blocks`; rows: all entries that it sees. Runs
    are ascending, and the last is the token's own, which may be unfinished."""
    places = torch.arange(block, dtype=torch.int32, device=q.device)
    unfinished = (rows.counts + (block - 1)) % block + 1 - block  # entries of the own run, less a whole one
    counts = (runs.counts * block + unfinished).clamp(min=0).to(torch.int32)
    parts = []
    for first in range(0, len(q), WITHIN_AT_ONCE):
        part = slice(first, first + WITHIN_AT_ONCE)
        table = (runs.slots[part, :, None] * block + places).flatten(1).clamp_(min=0)
        each = torch.arange(len(table), device=q.device)
        some = EntryRows(table, each, counts[part], table.shape[1])
        parts.append(select(q[part], weights[part], keys, scales, some, top_k))
    if len(parts) == 1:
        return parts[0]
    return Selection(torch.cat([part.slots for part in parts]), torch.cat([part.counts for part in parts]))
