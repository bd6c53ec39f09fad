"""Converts our per-token row table into the compressed page lists (CSR) that library kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.layers.step_rows import DecodeRows, ExtendRows


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a batch as CSR lists, int32; `indptr` and `last_len` on the host, `indices` on the device."""

    indptr: torch.Tensor  # [B + 1]
    last_len: torch.Tensor  # [B], tokens on the last page
    indices: torch.Tensor  # [indptr[-1]]


def gather_pages(
    rows: DecodeRows | ExtendRows, table: int, page_size: int, window: int = 0, entered: bool = False
) -> Pages:
    """Returns the pages that hold the first seq_lens tokens of each request; with a `window` only those that the new
    tokens see, because earlier ones may belong to another request by now. Launches a few kernels, never synchronizes.

    The last page of a decoding request comes from `out_cache_loc`, because before a graph's replay the table does not
    have it yet. Sliding-window tables do (`AttentionSites`), and for them `out_cache_loc` is one replay behind.
    entered: this table has it too, and requests may have no tokens in it.
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
