"""A batch's cache pages in the compressed form that library kernels take, from our per-token table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.layers.step_rows import DecodeRows, ExtendRows


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a batch in the wrappers' form: int32, `indptr` and `last_len` on the host, `indices` on the device."""

    indptr: torch.Tensor  # [B + 1]
    last_len: torch.Tensor  # [B], tokens on the last page
    indices: torch.Tensor  # [indptr[-1]]


def gather_pages(
    rows: DecodeRows | ExtendRows, table: int, page_size: int, window: int = 0, entered: bool = False
) -> Pages:
    """The pages that hold the first seq_lens tokens of each request; with a `window` those that its new tokens see,
    because what lies before may be another request's by now. Launches a few kernels, never synchronizes.

    The last page of a request that decodes comes from `out_cache_loc`: before a graph's replay the table does not have
    it yet. Tables of windows do (`AttentionSites`), and there `out_cache_loc` is a replay behind. entered: so does this
    table, in which a request may have no tokens.
    """
    assert rows.seq_lens_cpu is not None
    slots = rows.token_slots[table]
    lens = np.asarray(rows.seq_lens_cpu, dtype=np.int32)
    cached = lens - 1 if isinstance(rows, DecodeRows) else np.asarray(rows.prefix_lens_cpu, dtype=np.int32)
    first = np.maximum(cached - (window - 1), 0) // page_size if window else np.zeros_like(lens)
    counts = (lens + page_size - 1) // page_size - first
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(indptr[-1])
    device = slots.req_to_token.device
    counts_dev = (rows.seq_lens + page_size - 1) // page_size
    first_dev = torch.zeros_like(counts_dev)
    if window:
        cached_dev = rows.seq_lens - 1 if isinstance(rows, DecodeRows) else rows.prefix_lens
        first_dev = (cached_dev - (window - 1)).clamp(min=0) // page_size
        counts_dev = counts_dev - first_dev
    request = torch.repeat_interleave(rows.req_pool_indices, counts_dev, output_size=total)
    start = torch.repeat_interleave(torch.cumsum(counts_dev, 0) - counts_dev - first_dev, counts_dev, output_size=total)
    page = torch.arange(total, device=device) - start
    indices = torch.div(slots.req_to_token[request, page * page_size], page_size, rounding_mode="floor").int()
    if isinstance(rows, DecodeRows) and not window and not entered:
        indices[torch.cumsum(counts_dev, 0) - 1] = torch.div(
            slots.out_cache_loc, page_size, rounding_mode="floor"
        ).int()
    return Pages(torch.from_numpy(indptr), torch.from_numpy((lens - 1) % page_size + 1), indices)
