"""A batch's cache pages in the compressed form that library kernels take, from our per-token table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch, TokenSlots


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a batch in the wrappers' form: int32, `indptr` and `last_len` on the host, `indices` on the device."""

    indptr: torch.Tensor  # [B + 1]
    last_len: torch.Tensor  # [B], tokens on the last page
    indices: torch.Tensor  # [indptr[-1]]


def gather_pages(batch: ForwardBatch, slots: TokenSlots, page_size: int) -> Pages:
    """The pages that hold the first seq_lens tokens of each request. Launches a few kernels, never synchronizes.

    The last page of a DECODE batch comes from `out_cache_loc`: before a graph's replay the table does not have it yet.
    """
    assert batch.seq_lens_cpu is not None
    lens = np.asarray(batch.seq_lens_cpu, dtype=np.int32)
    counts = (lens + page_size - 1) // page_size
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(indptr[-1])
    device = slots.req_to_token.device
    counts_dev = (batch.seq_lens + page_size - 1) // page_size
    rows = torch.repeat_interleave(batch.req_pool_indices, counts_dev, output_size=total)
    first = torch.repeat_interleave(torch.cumsum(counts_dev, 0) - counts_dev, counts_dev, output_size=total)
    page = torch.arange(total, device=device) - first
    indices = torch.div(slots.req_to_token[rows, page * page_size], page_size, rounding_mode="floor").int()
    if batch.forward_mode.is_decode():
        indices[torch.cumsum(counts_dev, 0) - 1] = torch.div(
            slots.out_cache_loc, page_size, rounding_mode="floor"
        ).int()
    return Pages(torch.from_numpy(indptr), torch.from_numpy((lens - 1) % page_size + 1), indices)
